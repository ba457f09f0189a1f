"""Weights to start training from: timm's hub, or a model folder of ours."""

import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import constants, try_to_load_from_cache

from components.core.errors import CasemateError
from components.models.adapt import head_keys
from components.models.checkpoint import load_model
from components.models.importing.match import ImportReport, load_matching, with_notes
from components.models.pixels import PixelModel

KEY = "model.pretrained"
PROBE_SECONDS = 5.0


def load_pretrained(
    model: PixelModel, source: str, *, kernel_method: str = "bilinear"
) -> ImportReport:
    """Fill `model` with pretrained weights in place; a head for other classes starts fresh.

    `source` is `timm` (the default weights of the architecture on timm's hub) or a model folder.
    Position tables and the patch kernel are resampled to the model's sizes (`adapt.fit_sizes`).
    """
    if source == "timm":
        net = _timm_network(model.spec.architecture)
        mean, std = net.pretrained_cfg["mean"], net.pretrained_cfg["std"]
        num_classes = net.num_classes
    elif Path(source).is_dir():
        parent = load_model(Path(source))
        net, mean, std = parent.net, parent.spec.mean, parent.spec.std
        num_classes = parent.spec.num_classes
    else:
        raise CasemateError(KEY, source, "is neither `timm` nor a model folder")
    other_classes = num_classes != model.spec.num_classes
    report = load_matching(
        model.net,
        net.state_dict(),
        origin=(KEY, source),
        remedy="choose weights of the same architecture",
        allow_missing=sorted(head_keys(model.net)) if other_classes else (),
        kernel_method=kernel_method,
    )
    if (mean, std) == (model.spec.mean, model.spec.std):
        return report
    return with_notes(report, [f"pretrained with mean {mean} and std {std}, this model has others"])


def _timm_network(architecture: str) -> Any:
    """timm's network of that name with its hub weights, from the cache if they are there."""
    config = timm.get_pretrained_cfg(architecture) if timm.is_model(architecture) else None
    if config is None or not config.has_weights:
        raise CasemateError(
            KEY, "timm", f"has no weights for {architecture}; import some: casemate import-weights"
        )
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
