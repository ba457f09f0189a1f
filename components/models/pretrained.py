"""Weights to start training from: timm's hub, or a model folder of ours.

A start keeps its meaning only inside the function it was trained as. So the new model must have the
parent's architecture, normalisation and options, but for options that sizes follow from and those
that act in training alone; tensors would fit, and their network be another, with other heads.
"""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import constants, try_to_load_from_cache
from torch import nn

from components.core.errors import CasemateError
from components.models.adapt import head_keys
from components.models.checkpoint import load_model, read_header
from components.models.importing.match import ImportReport, load_matching
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec

KEY = "model.pretrained"
TIMM = "timm"
PROBE_SECONDS = 5.0
# Sizes, which `adapt` fits; and what a loaded network in eval mode does not depend on.
_FREE_OPTION = re.compile(r"patch_size|stem_patch|window_size|(\w+_)?drop(_\w+)?_rate|init_values")


@dataclass(frozen=True, slots=True)
class Parent:
    """Starting weights, as far as they are known before they are read."""

    source: str  # `timm`, or the model folder
    architecture: str
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    options: Mapping[str, Any]
    digest: str | None  # of a model folder


def read_parent(source: str, *, architecture: str) -> Parent:
    """The parent at `source`: timm's default weights of `architecture`, or a model folder."""
    if source == TIMM:
        config = _timm_config(architecture)
        mean, std = tuple(config.mean), tuple(config.std)
        return Parent(TIMM, architecture, config.num_classes, mean, std, {}, None)
    folder = Path(source)
    if not folder.is_dir():
        raise CasemateError(KEY, source, "is neither `timm` nor a model folder")
    header = read_header(folder)
    spec = ModelSpec.from_dict(header["spec"], source=str(folder / "model.json"))
    return Parent(
        source=source,
        architecture=spec.architecture,
        num_classes=spec.num_classes,
        mean=spec.mean,
        std=spec.std,
        options=spec.options,
        digest=str(header["digest"]),
    )


def check_descent(spec: ModelSpec, parent: Parent) -> None:
    """Refuse a model that would make another function of the parent's weights."""
    if spec.architecture != parent.architecture:
        raise CasemateError(
            "model.architecture", spec.architecture, f"is not that of {_whose(parent)}"
        )
    for key in sorted({*spec.options, *parent.options}):
        ours, theirs = (_option(options, key) for options in (spec.options, parent.options))
        if ours != theirs and not _FREE_OPTION.fullmatch(key):
            raise CasemateError(
                f"model.options.{key}", ours, f"changes what the weights of {_whose(parent)} mean"
            )
    for key, given, found in (("mean", spec.mean, parent.mean), ("std", spec.std, parent.std)):
        if len(given) != len(found) or any(
            abs(a - b) > 1e-6
            for a, b in zip(given, found, strict=True)  # what float32 tells apart
        ):
            raise CasemateError(
                f"model.{key}", given, f"contradicts that of {_whose(parent)}; leave it out"
            )


def _whose(parent: Parent) -> str:
    """The parent with the values at stake."""
    if parent.source == TIMM:
        return f"timm's {parent.architecture}: mean {parent.mean}, std {parent.std}, no options"
    return (
        f"{parent.source}: {parent.architecture}, mean {parent.mean}, std {parent.std}, "
        f"options {dict(parent.options)}"
    )


def _option(options: Mapping[str, Any], key: str) -> str:
    return json.dumps(options[key], default=str) if key in options else "(default)"


def load_pretrained(
    model: PixelModel, source: str, *, kernel_method: str = "bilinear"
) -> ImportReport:
    """Fill `model` with pretrained weights in place; a head for other classes starts fresh.

    `source` is `timm` (the default weights of the architecture on timm's hub) or a model folder.
    Position tables and the patch kernel are resampled to the model's sizes (`adapt.fit_sizes`).
    """
    parent = read_parent(source, architecture=model.spec.architecture)
    check_descent(model.spec, parent)
    net: nn.Module = (
        _timm_network(parent.architecture) if source == TIMM else load_model(Path(source)).net
    )
    other_classes = parent.num_classes != model.spec.num_classes
    return load_matching(
        model.net,
        net.state_dict(),
        origin=(KEY, source),
        remedy="choose weights of the same architecture",
        allow_missing=sorted(head_keys(model.net)) if other_classes else (),
        kernel_method=kernel_method,
    )


def _timm_config(architecture: str) -> Any:
    config = timm.get_pretrained_cfg(architecture) if timm.is_model(architecture) else None
    if config is None or not config.has_weights:
        raise CasemateError(
            KEY, TIMM, f"has no weights for {architecture}; import some: casemate import-weights"
        )
    return config


def _timm_network(architecture: str) -> Any:
    """timm's network of that name with its hub weights, from the cache if they are there."""
    config = _timm_config(architecture)
    cached = _cached_file(config)
    if cached is None:
        _check_reachable(constants.ENDPOINT if config.hf_hub_id else config.url)
    overlay = {"file": cached, "custom_load": False} if cached else None
    try:
        return timm.create_model(architecture, pretrained=True, pretrained_cfg_overlay=overlay)
    except (OSError, RuntimeError, ValueError) as error:
        raise _unreachable(architecture, error) from error


def _cached_file(config: Any) -> str | None:
    if not config.hf_hub_id:
        return None
    filename = config.hf_hub_filename or "model.safetensors"
    path = try_to_load_from_cache(config.hf_hub_id, filename)
    return path if isinstance(path, str) else None


def _check_reachable(address: str) -> None:
    """One short question before timm asks: left alone it would repeat itself for minutes."""
    try:
        urllib.request.urlopen(
            urllib.request.Request(address, method="HEAD"), timeout=PROBE_SECONDS
        ).close()
    except urllib.error.HTTPError:
        return  # an answer, if not a kind one: the hub is there
    except OSError as error:
        raise _unreachable(address, error) from error


def _unreachable(what: str, error: Exception) -> CasemateError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CasemateError(
        KEY,
        "timm",
        f"cannot fetch weights from {what} ({reason}); download them elsewhere, bring them in with "
        "casemate import-weights and name the model folder here",
    )
