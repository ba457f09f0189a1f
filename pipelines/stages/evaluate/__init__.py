"""Stage evaluate: what models withstand, measured; one step per suite.

Every step `evaluate.<suite>` writes three files, and two suites a table of their own:

- `metrics.parquet`: one row per number, the columns of `components/evaluate/metrics.py`. Numbers
  about a suite as a whole have the item `all`; a number that cannot be computed is null, with the
  reason as a flag that begins with `null: `.
- `summary.json`: `suite`, `settings`, `num_items`, `flags`, `models` (name -> `digest` and
  `metrics`, by the names of MLflow without `evaluate/<suite>/`) and `headlines`, the rows of a
  flow's summary.
- `predictions.parquet`: one row per model and item, sorted.

`evaluate.clean`
    Without an evaluate section: the trained classifiers that nothing attacks.
    metrics: `all`: accuracy, top5_accuracy, ece; with the number of the bin as level bin_accuracy,
    bin_confidence. Name of a class: class_accuracy.
    predictions: model, item_id, label, prediction, top5, confidence.
`evaluate.remaining`
    `clean` on the trained classifiers that the evaluate section leaves out and nothing attacks.
`evaluate.corruptions`
    metrics: corruption, with the severity as level: accuracy, top5_accuracy. `all`: mean75, mean95,
    mean_<group>, mean_error75, ce_<corruption>, mce, relative_mce.
    predictions: model, corruption, severity, item_id, label, prediction, top5, confidence.
`evaluate.shifts`
    metrics: name of the shift: masked, unmasked, clean_masked, clean_unmasked, gap_masked,
    gap_unmasked.
    predictions: model, shift, images (`shifted` or `clean`), item_id, label, masked_prediction,
    prediction.
`evaluate.shape_bias`
    metrics: `all`: shape_acc, shape_acc_conflict, texture_acc, shape_bias. Shape: shape_bias.
    predictions: model, item_id, shape, texture, decision (names of the 16 classes).
`evaluate.transfer`
    metrics: `clean`: accuracy. `<attack>/<source>`, with eps as level: accuracy, drop,
    transfer_rate; the model of a row is the target.
    predictions: item_id, label, attack (`clean`, `fgsm`, `pgd`), source, target, prediction.
    `matrix.parquet`: attack, eps, source, target, accuracy, lo95, hi95, clean, drop, transfer_rate,
    n, reason (of nulls).
`evaluate.spatial`
    metrics: grid, as in `9x9x31-16px-30deg`: accuracy, clean_accuracy, mean_queries; with
    `early_exit: false` and the angle as level angle_accuracy, angle_fail_share.
    predictions: model and the columns of `components/evaluate/spatial.py`.
    `failure_map.parquet` (`early_exit: false`): model, angle, right, down, num_failures, num_worst,
    num_items.

Where several models see the same items, `difference_to/<other>` and `mcnemar_p/<other>` compare
their accuracies: clean, every variant of a corruption, masked and unmasked accuracy of a shift
(items `<shift>/masked`, `<shift>/unmasked`), shape_acc, clean accuracy of transfer, spatial.
"""
