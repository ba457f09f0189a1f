"""`--smoke`: any recipe shrunk to seconds on a CPU, through the same code.

Fewer items, epochs, steps and draws; smaller images and networks of the same family; and if a
recipe's files are not on this machine, generated images. Works on the plain values of a
valid recipe; the caller validates the result.
"""

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from components.certify.registry import settings_of
from components.core.errors import CasemateError
from components.data.sources import find_source, open_source
from components.denoising.settings import is_on_disk
from pipelines.recipe.schema.analyze import STUDIES

Values = dict[str, Any]

LIMITS = {"train": 192, "val": 48, "test": 24, "synthetic": 96}
CAPS = {
    "epochs": 2,
    "val_items": 16,
    "val_steps": 2,
    "eps_warmup_epochs": 1,
    "eps_zero_epochs": 0,
    "cooldown_epochs": 1,
    "start_epoch": 0,
    "every": 1,
    "max_batches": 2,
    "warmup_epochs": 1,
    "batch_size": 64,
    "num_steps": 3,
    "num_items": 16,
    "max_items": 16,
    "num_draws": 4,
    "num_levels": 3,
    "micro_batch": 50,
    "train_items": 96,
    "grace_epochs": 1,
    "interval": 1,
    "num_trials": 2,
    "num_queries": 50,
    "num_targets": 2,
    "num_restarts": 2,
    "num_angles": 3,
}
ANALYSIS_CAPS = {"num_samples": 3, "num_pictures": 4, "num_images": 4}
NETWORK_PLACES = {"counts", "distances", "depths", "positions", "patch_size"}
OPEN = ("num_items", "train_items", "num_steps", "num_queries", "max_batches")  # None means many
LENGTHS = ("band", "size", "pad")  # pixels, in training and searches

SIDE = 64  # side of images and network inputs: 16-pixel patches still give 4 x 4 tokens
MADE = {"classes": 10, "train": 40, "val": 20, "test": 20}
MADE_BATCH, MADE_DENOISER = 16, "made-denoiser"
MAX_TRIALS, MAX_CHANGES = 4, 3

_BLOCKS = {"depth": 2, "embed_dim": 32, "num_heads": 4}
_STAGES = {"layers": [1, 1, 1, 1], "channels": [8, 16, 24, 32]}
# Options of the smallest network of a family; the first prefix that matches a name is used.
NETWORKS: Mapping[str, Values] = {
    r"tiny_(vit|xcit)": {"depth": 2, "embed_dim": 32, "num_heads": 2},
    r"vit_\w+_patch14_": {**_BLOCKS, "patch_size": 16},  # 14 does not divide SIDE
    r"(vit|deit3?|cait|xcit|beit)_": _BLOCKS,
    r"(wide_)?resnet\d": _STAGES,
    r"preact_resnet18": {"layers": [1, 1, 1, 1], "widths": [8, 16, 24, 32]},
    r"wrn_28_10": {"layers": [1, 1, 1], "widths": [8, 16, 32]},
    r"tiny_unet": {"widths": [8, 16]},
    r"unet": {
        "block_out_channels": [8, 16],
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 8,
    },
    r"convnext_": {"depths": [1, 1, 1, 1], "dims": [8, 16, 24, 32]},
}


# Networks whose depth timm fixes, and a small one of their family.
STAND_INS: Mapping[str, str] = {r"resnetv2_\w+_bit": "preact_resnet18"}


def shrink(values: Values) -> list[str]:
    """Shrink a resolved recipe in place; returns a note for everything that was replaced."""
    notes: list[str] = []
    trains = values["train"] is not None
    data = values["data"]
    before = data["image_size"]
    made = trains and _stand_in(data, notes)
    data["limits"] = _limits(data)
    if trains:  # a given model and its input size cannot be changed
        _shrink_images(values, made=made, before=before)
        own = [variant["model"] for variant in values["train"]["variants"].values()]
        for model in filter(None, [values["model"], *own]):
            _shrink_model(model, notes)
        _train_denoiser(values, notes)
    caps = {**CAPS, "batch_size": MADE_BATCH} if made else CAPS
    _shrink_evaluation(values, made=made, notes=notes)
    _shrink_analysis(values, made=made, notes=notes)
    for section in ("train", "tune", "attack", "evaluate", "analyze"):
        _each(values.get(section), partial(_capped, caps=caps))
    for certify in values["certify"].values():
        with_own = {**caps, **settings_of(certify["kind"]).smoke_caps}
        _each(certify, partial(_capped, caps=with_own))
    _keep_valid(values, caps)
    if values["tune"]:
        _shrink_tune(values, caps, notes)
    return list(dict.fromkeys(notes))


def _stand_in(data: Values, notes: list[str]) -> bool:
    """Use generated images instead of missing files."""
    missing = [part for part in (data, data["synthetic"]) if part and _lacks_files(part)]
    for seed, part in enumerate(missing):
        notes.append(f"generated images instead of {part['source']}: no {part['path']} here")
        info = find_source(part["source"])
        own = {
            "classes": min(info.num_classes or MADE["classes"], MADE["classes"]),
            "channels": data["channels"] or info.channels or 3,
        }
        part |= {"source": "made", "path": None, "options": {**MADE, **own, "seed": seed}}
    return data in missing


def _lacks_files(part: Values) -> bool:
    reads = find_source(part["source"]).path == "needed"
    return reads and not Path(part["path"]).expanduser().exists()


def _limits(data: Values) -> dict[str, int]:
    """Few items, but at least one of every class: a thousand classes need more."""
    least = 2 * _num_classes(data)
    wanted = {**LIMITS, "train": max(LIMITS["train"], least)}
    if not data["synthetic"]:
        del wanted["synthetic"]
    return {k: min(v, data["limits"].get(k, v)) for k, v in wanted.items()}


def _num_classes(data: Values) -> int:
    """The classes of a source; of files that are here they are counted."""
    info = find_source(data["source"]).with_options(data["options"])
    if info.num_classes or info.by_name or info.path != "needed" or _lacks_files(data):
        return info.num_classes or 0
    try:
        return len(open_source(data["source"], path=data["path"], options=data["options"]).classes)
    except CasemateError:
        return 0  # reported when the data are prepared


def _shrink_images(values: Values, *, made: bool, before: int | None) -> None:
    """Smaller images, and every length that is measured in their pixels."""
    data, model = values["data"], values["model"]
    if before is not None and (made or data["fit"] != "pad"):  # padding cannot shrink images
        factor = min(1.0, SIDE / before)
        for key in ("image_size", "resize", "train_size"):
            if data[key] is not None:
                data[key] = _scaled(data[key], factor)
        for section in ("train", "tune"):
            _each(values[section], partial(_resized, factor=factor, lengths=LENGTHS))
        for certify in values["certify"].values():
            lengths = settings_of(certify["kind"]).pixel_fields
            _each(certify, partial(_resized, factor=factor, lengths=lengths))
    if model["upsample"] is not None:
        model["upsample"] = min(model["upsample"], SIDE)
    sizes = [data[key] for key in ("image_size", "resize", "train_size") if data[key]]
    for part in (data, data["synthetic"]):
        if part and part["source"] == "made":
            part["options"].setdefault("image_size", max(sizes, default=32))


def _shrink_evaluation(values: Values, *, made: bool, notes: list[str]) -> None:
    """Few items and poses; suites without their files use generated images or are left out."""
    if not (section := values.get("evaluate")):
        return
    if section["subset"]["item_ids"]:  # of the full data
        section["subset"] = {}
    section["subset"] = {"num_items": CAPS["num_items"], **section["subset"], "by_class": False}
    stored = section["corruptions"]
    if stored and stored["path"] and not _is_here(stored["path"]):
        notes.append(f"generated corruptions: no {stored['path']} here")
        section["corruptions"] |= {"source": "generate", "path": None}
    if stored and stored["textures"] and not _is_here(stored["textures"]):
        section["corruptions"]["textures"] = None
    for number, (name, shift) in enumerate(list(section["shifts"].items()), start=1):
        if shift["path"] and not _is_here(shift["path"]):
            if made:
                own = {**values["data"]["options"], "seed": number}
                shift |= {"source": "made", "path": None, "options": own, "class_map": {}}
                notes.append(f"generated images instead of shift {name}: no files here")
            else:
                del section["shifts"][name]
                notes.append(f"no shift {name}: no {shift['path']} here")
    if (shape := section["shape_bias"]) and (made or not _is_here(shape["path"])):
        section["shape_bias"] = None
        notes.append(f"no shape_bias: no {shape['path']} here")
    if (transfer := section["transfer"]) and transfer["models"] and values["train"] is not None:
        notes.append("no transfer to other models: the networks of this run are smaller")
        transfer["models"] = {}
    if section["spatial"]:
        grid = section["spatial"]["grid"] or {}
        section["spatial"]["grid"] = {**grid, "max_shift": 2.0, "num_shifts": 3, "num_angles": 3}


def _shrink_analysis(values: Values, *, made: bool, notes: list[str]) -> None:
    """Few items, sets and pictures; all positions of the smaller network that is trained."""
    if not (section := values.get("analyze")):
        return
    for study in filter(None, (section[name] for name in STUDIES)):
        if "subset" in study:
            if study["subset"]["item_ids"]:  # of the full data
                study["subset"] = {"num_items": CAPS["num_items"]}
            study["subset"]["by_class"] = False
        for key, cap in ANALYSIS_CAPS.items():
            if key in study:
                study[key] = min(study[key], cap)
        if values["train"] is not None:  # they may lie beyond the smaller network
            study |= dict.fromkeys(NETWORK_PLACES & set(study))
    _replace_others(section, values["train"], notes)
    _replace_judges(section["perturbations"], made=made, notes=notes)


def _replace_others(section: Values, train: Values | None, notes: list[str]) -> None:
    """Models of this run instead of given ones, which are for larger images."""
    for name, folder in list(section["other_models"].items()):
        if train is not None:
            notes.append(f"a model trained by this run instead of {folder}")
            train["variants"][name] = {"objective": {"kind": "standard"}}
            if section["models"]:
                section["models"].append(name)
        elif not _is_here(folder):
            notes.append(f"no model {name}: no {folder} here")
        else:
            continue
        del section["other_models"][name]


def _replace_judges(how: Values | None, *, made: bool, notes: list[str]) -> None:
    """Judges that are here and know the classes; without any, `main` judges."""
    gone = [name for name, at in (how["judges"] if how else {}).items() if made or not _is_here(at)]
    for name in gone:
        assert how is not None
        folder = how["judges"].pop(name)
        why = "images are generated" if made else f"no {folder} here"
        notes.append(f"no judge {name}: {why}")
        if not how["judges"] and not how["judge_models"]:
            notes.append("main is the judge: no other one is left")
            how["judge_models"] = ["main"]


def _is_here(path: str) -> bool:
    return Path(path).expanduser().exists()


def _scaled(length: int, factor: float) -> int:
    return max(1, round(length * factor))


def _resized(key: str, value: Any, factor: float, lengths: Collection[str]) -> Any:
    if key not in lengths or value in (None, 0):
        return value
    if isinstance(value, list):
        return sorted({_scaled(length, factor) for length in value})
    return _scaled(value, factor)


def _shrink_model(model: Values, notes: list[str]) -> None:
    """A small network of the same family, with fresh weights."""
    if model["pretrained"]:
        notes.append(f"fresh weights instead of {model['pretrained']}")
        model["pretrained"] = None
    for name, smaller in STAND_INS.items():
        if re.match(name, model["architecture"]):
            notes.append(f"{smaller} instead of {model['architecture']}: timm fixes its depth")
            model |= {"architecture": smaller, "options": {}}
    small = _small_options(model["architecture"])
    if small is None:
        notes.append(f"{model['architecture']} at its full size: no smaller one is known")
    model["options"] |= small or {}


def _train_denoiser(values: Values, notes: list[str]) -> None:
    """Train a denoiser in the recipe instead of one that is not on disk."""
    train = values["train"]
    users = [train["objective"], *(v["objective"] for v in train["variants"].values())]
    for user in [*users, *values["certify"].values()]:
        where = user.get("denoiser") or ""
        if is_on_disk(where) and not Path(where.partition(":")[2]).expanduser().exists():
            notes.append(f"a denoiser trained by this run instead of {where}")
            user["denoiser"] = MADE_DENOISER
            train["variants"][MADE_DENOISER] = {
                "objective": {"kind": "denoiser", "range": [0, 1]},
                "model": {"architecture": "tiny_unet", "options": _small_options("tiny_unet")},
            }


def _small_options(architecture: str) -> Values | None:
    fits = (options for name, options in NETWORKS.items() if re.match(name, architecture))
    return next(fits, None)


def _each(values: Any, change: Callable[[str, Any], Any]) -> None:
    """Replace values of nested mappings by `change(key, value)`, sections inside lists too."""
    for inner in values if isinstance(values, list) else ():
        _each(inner, change)
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        values[key] = change(key.rpartition(".")[2], value)  # tuning writes dotted keys
        _each(values[key], change)


def _capped(key: str, value: Any, caps: Mapping[str, int]) -> Any:
    """A number limited to its cap; an open one becomes the cap."""
    if key in OPEN and value is None:
        return caps[key]
    if key in caps and isinstance(value, int) and not isinstance(value, bool):
        return min(value, caps[key])
    return value


def _keep_valid(values: Values, caps: Mapping[str, int]) -> None:
    """Restore the relations between numbers that must agree."""
    if train := values["train"]:  # all copies of an item share a batch, and mixing needs pairs
        unit = 2 * train["augment"]["copies"]
        if train["batch_size"] > unit:
            train["batch_size"] -= train["batch_size"] % unit
        if train["rate_rule"] != "absolute" and "floor" in train["schedule"]:
            train["schedule"]["floor"] = None  # the smaller peak may be below it
    for certify in values["certify"].values():
        settings_of(certify["kind"]).keep_valid(certify)
    for attack in values["attack"].values():
        if attack["curves"]:
            steps = attack["curves"]["steps"]
            attack["curves"]["steps"] = sorted({min(n, caps["num_steps"]) for n in steps})


def _shrink_tune(values: Values, caps: Mapping[str, int], notes: list[str]) -> None:
    """A few trials: two values of the first axes, one of the others; the first changes."""
    space, changes, num_trials = values["tune"]["space"], values["tune"].get("changes"), 1
    for key, axis in (space or {}).items():
        if not isinstance(axis, list):
            continue  # a distribution: `num_trials` is capped
        capped = [_capped(key.rpartition(".")[2], value, caps) for value in axis]
        if key == "model.architecture":
            capped = _same_family(capped, values["model"]["architecture"], notes)
        distinct = [value for n, value in enumerate(capped) if value not in capped[:n]]
        space[key] = distinct[: min(2, MAX_TRIALS // num_trials)]
        num_trials *= len(space[key])
    if changes:
        del changes[MAX_CHANGES:]
        for change in changes:
            if name := change["set"].get("model.architecture"):
                change["set"]["model.options"] = _small_options(name) or {}


def _same_family(architectures: list[str], own: str, notes: list[str]) -> list[str]:
    """The architectures that accept the recipe's shrunk options; its own if there are none."""
    options = _small_options(own)
    fits = [name for name in architectures if _small_options(name) == options]
    if left := [name for name in architectures if name not in fits]:
        notes.append(f"no trials of {', '.join(left)}: another family than {own}")
    return fits or [own]
