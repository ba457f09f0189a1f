"""Stage analyze: why models behave as they do; one step per study.

Every step `analyze.<study>` writes `metrics.parquet`, one row per number with the columns of
`components/evaluate/metrics.py`, and `summary.json`: `study`, `settings`, `num_items`, `models`
(name -> `digest` and `metrics`, by the names of MLflow without `analyze/<study>/`), `details` and
`headlines`, the rows of a flow's summary. Arrays are `.npy` files; pictures are uint8.

`analyze.correlation`
    metrics: `<stream>/<i>-<j>`: pearson_<mode>, cka_<estimator>.
    `<stream>/neighbours`: mean_similarity.
    `matrices/<model>.<stream>.npy`. details: `blocks` and `measures` by model.
`analyze.lesions`
    metrics: `none`: accuracy. Part, with the block as level: single_accuracy; with the number of
    removed parts as level: mean_accuracy, standard_error, min_accuracy, max_accuracy, num_sets.
    `predictions.parquet`: model, item_id, label, predictions (one per variant).
    `variants.parquet`: model, place in `predictions`, name. details: `blocks` by model.
`analyze.restricted_attention`
    metrics: spatial, random (level: distance), cls_first, cls_last, local_first, local_last (level:
    number of blocks): accuracy. Both tables and the details of lesions.
`analyze.gaps`
    metrics: `<images>/<scaling>/<module>`: quantiles, maximum, shares beyond the softmax limits.
    `states.parquet`: model and the columns of `components/analyze/states.py`. details: `scales`.
`analyze.perturbations`
    metrics: `patch_alignment` (level: pixels of a patch): score, rank, z. `<judge>/plus`,
    `<judge>/minus`, `chance`: top<k>_accuracy.
    `pictures/originals.npy`, `pictures/<model>.npy`, `judged.parquet`: model and the columns of
    `components/analyze/semantics.py`. details: `labels` of the pictures.
`analyze.accumulation`
    metrics: `all`: confidence, confidence_before: means over the images.
    `pictures/seeds.npy`, `pictures/<model>.npy`. details: `targets`, `confidence` by model.
"""
