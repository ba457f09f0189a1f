"""Import weights of other projects: a file and its description give a model and a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from components.core.digests import digest_file
from components.core.errors import CasemateError, at_key
from components.core.settings import default_of
from components.models.adapt import State
from components.models.catalog import find
from components.models.importing.layouts import AUTO, Unwrapped, to_timm_names, unwrap
from components.models.importing.match import ImportReport, load_matching
from components.models.importing.read import read_checkpoint
from components.models.pixels import PixelModel
from components.models.settings import ModelSettings, normalisation_problems
from components.models.spec import ModelSpec
from components.models.zoo import check_known

REMEDY = (
    "check architecture, sizes and options, or name what may start fresh with --allow-missing, "
    "what may be left out with --allow-unused"
)
HEADS = ("head", "head.fc", "head.linear", "fc", "classifier", "linear")  # one row per class


@dataclass(frozen=True, slots=True)
class Target:
    """The model of the weights; `None`: read from the file or the architecture."""

    architecture: str
    num_classes: int | None = None
    image_size: int | None = None  # native side of the images
    channels: int = 3
    upsample: int | None = None
    upsample_mode: str = default_of(ModelSettings, "upsample_mode")
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    token_policy: str = default_of(ModelSettings, "token_policy")
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Imported:
    """A model in eval mode, the import report, and the layout and entry of the file."""

    model: PixelModel
    report: ImportReport
    layout: str
    entry: str


def import_weights(
    path: Path,
    target: Target,
    *,
    layout: str = AUTO,
    entry: str | None = None,
    allow_missing: Sequence[str] = (),
    allow_unused: Sequence[str] = (),
    kernel_method: str = "bilinear",
) -> Imported:
    """The model with the weights in `path`, normalisation included.

    Mean and std come from the file or from `target`; there is no default, because a wrong pair
    lowers accuracy silently. Raises `DoesNotFit` if a tensor of the network would stay unset, or if
    a tensor of the file that contributes to the logits would be left out.
    """
    with at_key("--architecture"):
        check_known(target.architecture, target.options)
    checkpoint = read_checkpoint(path, entry=entry)
    weights = unwrap(checkpoint.tensors, layout=layout)
    spec = _spec(path, target, weights)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # for tensors not in the file: the same file gives the same model
        model = PixelModel(spec)
    state = weights.state
    if weights.layout != "hf-vit":  # already renamed
        state = to_timm_names(state, model.net)
    report = load_matching(
        model.net,
        state,
        origin=("weights", str(path)),
        remedy=REMEDY,
        allow_missing=allow_missing,
        allow_unused=allow_unused,
        kernel_method=kernel_method,
    )
    return Imported(model.eval(), report, weights.layout, checkpoint.entry)


def _spec(path: Path, target: Target, weights: Unwrapped) -> ModelSpec:
    origin = {"imported_from": path.name, "layout": weights.layout, "sha256": digest_file(path)}
    return ModelSpec(
        architecture=target.architecture,
        num_classes=target.num_classes or _count_classes(path, weights.state),
        channels=target.channels,
        image_size=target.image_size or _native_size(target),
        mean=_statistic("mean", path, target, given=target.mean, found=weights.mean),
        std=_statistic("std", path, target, given=target.std, found=weights.std),
        upsample=target.upsample,
        upsample_mode=target.upsample_mode,
        token_policy=target.token_policy,
        options=target.options,
        trained_for=origin,
    )


def _count_classes(path: Path, state: State) -> int:
    for head in HEADS:
        if f"{head}.weight" in state:
            return state[f"{head}.weight"].shape[0]
    raise CasemateError("--classes", path, "has no class head; give the number of classes")


def _native_size(target: Target) -> int:
    if target.upsample:
        raise CasemateError(
            "--image-size",
            "?",
            f"must be given: the native side that is up-sampled to {target.upsample}",
        )
    return find(target.architecture)[0].image_size


def _statistic(
    key: str,
    path: Path,
    target: Target,
    *,
    given: tuple[float, ...] | None,
    found: tuple[float, ...] | None,
) -> tuple[float, ...]:
    """Mean or std per channel; given and found must agree to float32 precision."""
    if given is None and found is None:
        neutral = ",".join(["0" if key == "mean" else "1"] * target.channels)
        raise CasemateError(
            f"--{key}",
            "?",
            f"is not in {path}; give the one it was trained with "
            f"({neutral} for raw [0, 1] pixels, as in Debenedetti's ImageNet models)",
        )
    values = found if given is None else given
    assert values is not None
    if len(values) != target.channels:
        raise CasemateError(f"--{key}", values, f"needs {target.channels} values, one per channel")
    if given and found and any(abs(a - b) > 1e-6 for a, b in zip(given, found, strict=False)):
        raise CasemateError(
            f"--{key}", given, f"contradicts {_rounded(found)} in {path}; leave it out"
        )
    if not all(map(isfinite, values)) or (key == "std" and min(values) <= 0):
        remedy = "must be finite and positive" if key == "std" else "must be finite"
        raise CasemateError(f"--{key}", values, remedy)
    for problem in normalisation_problems(given, None) if key == "mean" else ():
        raise CasemateError("--mean", problem.value, problem.remedy)
    return values


def _rounded(values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in values)
