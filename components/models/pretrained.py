"""Pretrained weights: from timm's hub or a model folder.

Weights are valid only for the function they were trained in. So the new model must have the
parent's architecture, normalisation and options, except for size options and those that act in
training only: with another number of heads, for example, all tensors fit but the function differs.
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
from components.core.folders import folder_at
from components.models.adapt import head_keys
from components.models.checkpoint import load_model, read_header
from components.models.importing.match import ImportReport, load_matching
from components.models.pixels import PixelModel
from components.models.settings import TIMM
from components.models.spec import ModelSpec

KEY = "model.pretrained"
PROBE_SECONDS = 5.0
# Sizes, which `adapt` resamples, and options without effect in eval mode.
_FREE_OPTION = re.compile(r"patch_size|stem_patch|window_size|(\w+_)?drop(_\w+)?_rate|init_values")


@dataclass(frozen=True, slots=True)
class Parent:
    """Description of pretrained weights before they are read."""

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
    folder = folder_at(source)
    if isinstance(folder, Path) and not folder.is_dir():
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


def check_compatible(spec: ModelSpec, parent: Parent) -> None:
    """Raise an error for a model that computes another function with the parent's weights."""
    if spec.architecture != parent.architecture:
        raise CasemateError(
            "model.architecture", spec.architecture, f"is not that of {_described(parent)}"
        )
    for key in sorted({*spec.options, *parent.options}):
        ours, theirs = (_option(options, key) for options in (spec.options, parent.options))
        if ours != theirs and not _FREE_OPTION.fullmatch(key):
            raise CasemateError(
                f"model.options.{key}",
                ours,
                f"changes what the weights of {_described(parent)} mean",
            )
    for key, given, found in (("mean", spec.mean, parent.mean), ("std", spec.std, parent.std)):
        if len(given) != len(found) or any(
            abs(a - b) > 1e-6
            for a, b in zip(given, found, strict=True)  # float32 precision
        ):
            raise CasemateError(
                f"model.{key}", given, f"contradicts that of {_described(parent)}; leave it out"
            )


def _described(parent: Parent) -> str:
    """The parent and its values, for error messages."""
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
    """Fill `model` with pretrained weights in place; a head for other classes is not loaded.

    `source` is `timm` (the default weights of the architecture on timm's hub) or a model folder.
    Position tables and the patch kernel are resampled to the model's sizes (`adapt.fit_sizes`).
    """
    parent = read_parent(source, architecture=model.spec.architecture)
    check_compatible(model.spec, parent)
    net: nn.Module = (
        timm_network(parent.architecture) if source == TIMM else load_model(folder_at(source)).net
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


def weights_name(source: str | None, *, architecture: str) -> str | None:
    """A short name of the weights that a model starts from: timm's tag, or the folder's name."""
    if source != TIMM:
        return None if source is None else Path(source).name
    config = timm.get_pretrained_cfg(architecture) if timm.is_model(architecture) else None
    return (config.tag if config else "") or TIMM


def _timm_config(architecture: str) -> Any:
    config = timm.get_pretrained_cfg(architecture) if timm.is_model(architecture) else None
    if config is None or not config.has_weights:
        raise CasemateError(
            KEY, TIMM, f"has no weights for {architecture}; import some: casemate import-weights"
        )
    return config


def timm_network(architecture: str, *, key: tuple[str, str] = (KEY, TIMM)) -> Any:
    """timm's network of that name with its hub weights, from the cache if present.

    `key` are the key and the value that errors name.
    """
    config = _timm_config(architecture)
    cached = _cached_file(config)
    if cached is None:
        check_reachable(constants.ENDPOINT if config.hf_hub_id else config.url, key=key)
    overlay = {"file": cached, "custom_load": False} if cached else None
    try:
        return timm.create_model(architecture, pretrained=True, pretrained_cfg_overlay=overlay)
    except (OSError, RuntimeError, ValueError) as error:
        raise _unreachable(architecture, error, key) from error


def _cached_file(config: Any) -> str | None:
    if not config.hf_hub_id:
        return None
    filename = config.hf_hub_filename or "model.safetensors"
    path = try_to_load_from_cache(config.hf_hub_id, filename)
    return path if isinstance(path, str) else None


def check_reachable(address: str, *, key: tuple[str, str]) -> None:
    """Check a hub with one short request: its client would retry for minutes."""
    try:
        urllib.request.urlopen(
            urllib.request.Request(address, method="HEAD"), timeout=PROBE_SECONDS
        ).close()
    except urllib.error.HTTPError:
        return  # an error response: the hub is reachable
    except OSError as error:
        raise _unreachable(address, error, key) from error


def _unreachable(what: str, error: Exception, key: tuple[str, str]) -> CasemateError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CasemateError(
        *key,
        f"cannot fetch weights from {what} ({reason}); download them elsewhere, import them with "
        "casemate import-weights and name the model folder here",
    )
