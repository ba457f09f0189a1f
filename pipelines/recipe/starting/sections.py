"""The sections of a first recipe, with a comment for every key."""

from collections.abc import Callable, Mapping
from typing import Any

from components.data.inspection import Inspected
from components.models.spec import ModelSpec
from pipelines.recipe.commented import Keys, Said
from pipelines.recipe.starting.facts import LARGE_RESIZE, PHOTO, Start, Task, patch_of

MOST_ATTACKED, MOST_CERTIFIED = 1000, 500  # test items
SIGMA = 0.25


def sections(begun: Start, *, name: str, gpus: bool) -> Keys:
    """The recipe of a task, with a comment for every key."""
    keys: dict[str, Said] = {
        "name": Said(name, "of its folder in the storage and of its runs in MLflow"),
        "seed": Said(0, "of weights, orders, attacks and draws"),
        "data": Said(_data(begun), f"found: {begun.data.because}"),
    }
    keys |= TASK_SECTIONS[begun.task](begun)
    if gpus:
        where = {
            "gpus_per_train_worker": Said(1, "found: this machine has GPUs; of each training"),
            "gpus_per_actor": Said(1, "of each worker of attacks and certificates"),
        }
        keys["cluster"] = Said(where, "where it runs; changes no result's identity")
    return keys


def _data(begun: Start) -> Keys:
    data, fitted = begun.data, begun.fitted
    keys = {"source": Said(data.source, f"`casemate data {data.source}` explains it")}
    if data.path is not None:
        keys["path"] = Said(data.path, "as given, absolute")
    if data.options:
        keys["options"] = Said(data.options, "of the source")
    keys["image_size"] = Said(fitted.image_size, "side in pixels; found: " + _size_text(data))
    keys["fit"] = Said(fitted.fit, fitted.why)
    if fitted.resize is not None:
        keys["resize"] = Said(fitted.resize, "shorter side before the centre is cropped")
    if _takes_random_crops(begun):
        keys["train_size"] = Said(LARGE_RESIZE, "training images are stored larger and cropped")
    seen = " and ".join({1: "grey", 3: "colour"}[number] for number in data.channels)
    repeated = (
        "; grey is repeated in three channels"
        if (1 in data.channels) & (begun.channels == 3)
        else ""
    )
    keys["channels"] = Said(begun.channels, f"found: {seen} images{repeated}")
    keys |= _split_keys(begun)
    if data.unreadable:
        remedy = f"found: {len(data.unreadable)} unreadable images; fail: stop at the first"
        keys["on_error"] = Said("skip", remedy)
    return keys


def _size_text(data: Inspected) -> str:
    if uniform := data.sizes.uniform:
        return f"all are {uniform[0]}x{uniform[1]}"
    height, width = data.sizes.mean
    return f"{len(data.sizes.shapes)} sizes, {height:.0f}x{width:.0f} on average"


def _split_keys(begun: Start) -> dict[str, Said]:
    if begun.data.test_only:
        return {}
    found, counts = begun.data.splits, begun.splits
    keys = {"split_seed": Said(0, "which items are in which split; independent of `seed`")}
    for split, share in zip(("val", "test"), begun.fractions, strict=True):
        if split not in found:
            text = f"found: no {split} split; this share of each class, {counts[split]} images"
            keys[f"{split}_fraction"] = Said(share, text)
    return keys


def _takes_random_crops(begun: Start) -> bool:
    return begun.is_large and begun.spec is None and begun.fitted.fit == "crop"


def _training(begun: Start) -> dict[str, Said]:
    """The task `train`: one robust model, and the attack that measures it."""
    return {"model": Said(_network(begun)), "train": Said(_train(begun)), **_attack(begun)}


def _tuning(begun: Start) -> dict[str, Said]:
    """The task `tune`: a small grid, every trial trained to its end."""
    train = _train(begun)
    rates = [3e-5, 1e-4] if begun.is_large else [3e-4, 1e-3]
    space = {
        "train.learning_rate": Said(rates, "axes of the grid: any key of the recipe"),
        "train.weight_decay": Said([0.05, 0.5], "Debenedetti et al. 2023: more is more robust"),
    }
    tune = {
        "space": Said(space, "four trials; the best one becomes best.yaml, a recipe to run"),
        "scheduler": Said({"kind": "none"}, "every trial to its end; asha stops bad ones early"),
        "epochs": Said(max(2, train["epochs"].value // 3), "of a trial; a third of a training"),
        "attack": Said(
            {"num_items": 256}, "validation items; trials are ranked by APGD-CE on them"
        ),
    }
    return {
        "model": Said(_network(begun)),
        "train": Said(train),
        "tune": Said(tune, "compares on validation items alone; test items stay unseen"),
        **_attack(begun),
    }


def _attacking(begun: Start) -> dict[str, Said]:
    if begun.folder is not None:
        return {"model": Said(_given(begun)), **_attack(begun, curves=True)}
    plain = {"standard": Said({"objective": {"kind": "standard"}}, "the same without attacks")}
    train = _train(begun) | {"variants": Said(plain, "a second model, to compare with")}
    return {
        "model": Said(_network(begun)),
        "train": Said(train, "there is no model yet; --model DIR attacks a finished one"),
        **_attack(begun, models=["main", "standard"], curves=True),
    }


def _certifying(begun: Start) -> dict[str, Said]:
    if begun.spec is not None:
        return {"model": Said(_given(begun)), "certify": Said(_of_given(begun, begun.spec))}
    noisy = Said({"objective": {"kind": "gaussian", "sigma": SIGMA}}, "trained on Gaussian noise")
    band = Said(_band(begun.side), "pixels that an ablation shows; 19 of 224, 4 of 32 are usual")
    objective = {"kind": Said("columns", "trained on column ablations"), "band": band}
    train = {
        "objective": Said(objective, "Salman et al. 2022: images of which one column is left"),
        "variants": Said({"noisy": noisy}, "a second model, for the second certificate"),
        **_optimisation(begun),
    }
    drops = {"token_policy": Said("drop", "hidden tokens are left out: several times faster")}
    return {
        "model": Said(_network(begun) | drops),
        "train": Said(train, "there is no model yet; --model DIR certifies a finished one"),
        "certify": Said({"patch": _patch(begun), "l2": _l2(begun, model="noisy", sigma=SIGMA)}),
    }


TASK_SECTIONS: Mapping[Task, Callable[[Start], dict[str, Said]]] = {
    "attack": _attacking,
    "certify": _certifying,
    "train": _training,
    "tune": _tuning,
}


def _given(begun: Start) -> Keys:
    assert begun.spec is not None
    text = f"{begun.spec.architecture}, {begun.spec.num_classes} classes"
    return {"pretrained": Said(begun.folder, f"as given: {text}; it is not trained")}


def _network(begun: Start) -> dict[str, Said]:
    """A network that suits the size of the images and their number."""
    if begun.is_large:
        return {
            "architecture": Said(
                "vit_small_patch16_224", "of timm; `casemate models` lists others"
            ),
            "pretrained": Said("timm", "ImageNet weights, downloaded; null: from random ones"),
        }
    few = begun.num_train < 10_000
    width, depth = (64, 4) if few else (192, 6)
    options = {"patch_size": patch_of(begun.side), "embed_dim": width, "depth": depth}
    tokens = begun.side // options["patch_size"]
    why = f"{tokens}x{tokens} tokens; small, for {begun.num_train} training images"
    return {
        "architecture": Said("tiny_vit", f"a ViT for small images, here of {begun.side} px"),
        "options": Said({**options, "num_heads": 4}, why),
    }


def _train(begun: Start) -> dict[str, Said]:
    optimisation = _optimisation(begun)
    warmup = max(1, optimisation["epochs"].value // 5)
    steps = {"kind": Said("pgd", "ten small steps per image (Madry et al. 2018)")}
    if begun.is_large:
        steps = {
            "kind": Said(
                "fgsm", "one step per image (Debenedetti et al. 2023): a fifth of the cost"
            )
        }
    rise = Said(warmup, "epochs in which eps rises: the training stays stable")
    objective: dict[str, Any] = {**steps, "eps": begun.eps, "eps_warmup_epochs": rise}
    return {"objective": Said(objective, "trains on attacked images"), **optimisation}


def _optimisation(begun: Start) -> dict[str, Said]:
    number = begun.num_train
    batch = next((size for size in (128, 64, 32, 16, 8) if number >= 8 * size), 4)
    epochs = 20 if begun.is_large or number >= 10_000 else 30
    rate = 1e-4 if begun.is_large else 1e-3
    keys = {
        "epochs": Said(epochs, "of each model; more epochs give more robust models"),
        "batch_size": Said(batch, f"of all workers together, for {number} training images"),
        "learning_rate": Said(rate, "of AdamW, after one epoch of warm-up; a cosine to its 100th"),
    }
    if begun.is_photos:
        keys["augment"] = _augment(begun)
    return keys


def _augment(begun: Start) -> Said:
    if _takes_random_crops(begun):
        crops = {"crop": "resized", "scale": [0.35, 1.0], "flip": True}
        return Said(crops, "random crops; no flip where left and right differ in meaning")
    pad = max(1, begun.side // 8)
    shifts = {"crop": "pad", "pad": pad, "flip": True}
    return Said(shifts, "random shifts; no flip where left and right differ in meaning")


def _attack(
    begun: Start, *, models: list[str] | None = None, curves: bool = False
) -> dict[str, Said]:
    keys: dict[str, Said] = {}
    if models:
        keys["models"] = Said(models)
    keys["norm"] = Said("linf", "largest change of a pixel; or l2")
    keys["eps"] = begun.eps
    if len(begun.data.classes) > 3:
        keys["attacks"] = Said([{"kind": "autoattack"}], "the standard of RobustBench")
    else:
        members: list[dict[str, Any]] = [{"kind": "apgd-ce"}, {"kind": "fab"}, {"kind": "square"}]
        text = "parts of AutoAttack: the whole one needs more than three classes"
        keys["attacks"] = Said(members, text)
    keys["num_items"] = _num_items(begun, MOST_ATTACKED)
    if curves:
        budgets = _budgets(begun.eps.value)
        keys["curves"] = Said({"eps": budgets}, "PGD at rising budgets, on 100 items")
    return {"attack": Said({"linf": Said(keys)}, "measures robust accuracy on test items")}


def _budgets(eps: float | str) -> list[float | str]:
    if isinstance(eps, str):
        grays = int(eps.partition("/")[0])
        return [f"{grays // 4 * step}/255" for step in (1, 2, 4, 8, 16)]
    return [eps / 4, eps / 2, eps, 2 * eps, 4 * eps]


def _num_items(begun: Start, most: int) -> Said:
    there = begun.splits.get("test", 0)
    if there <= most:
        return Said(None, f"null: all {there} test items")
    return Said(most, f"of {there} test items, the first of their shuffled order; null: all")


def _of_given(begun: Start, spec: ModelSpec) -> Keys:
    """The certificate that suits the training of a given model."""
    trained = spec.trained_for or {}
    if trained.get("kind") in ("columns", "ablation"):
        return {"patch": _patch(begun, kind=_shape(trained))}
    sigma = trained.get("sigma", SIGMA) if trained.get("kind") == "gaussian" else SIGMA
    return {"l2": _l2(begun, model="main", sigma=sigma)}


def _shape(trained: Mapping[str, Any]) -> str:
    shape = trained.get("shape", "column")
    return f"{shape}s"


def _patch(begun: Start, *, kind: str = "columns") -> Said:
    keys = {
        "kind": Said(kind, "votes of all ablations; band and tokens as in training"),
        "patch_sizes": Said(
            _patches(begun.side), "sides in pixels; 1, 2 and 3 % of the image area"
        ),
        "num_items": _num_items(begun, MOST_CERTIFIED),
    }
    return Said(keys, "no square patch of such a side, anywhere, changes a certified label")


def _l2(begun: Start, *, model: str, sigma: float) -> Said:
    draws = Said(10_000, "noisy copies of an item; 100000 are usual and give larger radii")
    keys = {
        "kind": Said("gaussian", "randomized smoothing (Cohen et al. 2019)"),
        "model": Said(model),
        "sigma": Said(sigma, "of the noise, as in training; larger: larger radii, lower accuracy"),
        "num_estimate": draws,
        "num_items": _num_items(begun, MOST_CERTIFIED),
    }
    return Said(keys, "no change of a smaller l2 norm changes a certified label")


def _band(side: int) -> int:
    return max(1, round(side / (12 if side >= PHOTO else 8)))


def _patches(side: int) -> list[int]:
    """Sides of squares of 1, 2 and 3 % of the image area."""
    return sorted({max(1, round(side * (share / 100) ** 0.5)) for share in (1, 2, 3)})
