"""Models of two hubs: timm's pretrained weights, and image classifiers on Hugging Face.

Repositories of timm are read by timm itself. Of the classifiers of transformers, ViT is read: its
tensors have timm's function under other names. Weights are read as tensors only.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import timm
from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from components.core.errors import CasemateError, first_line
from components.core.hints import nearest_of
from components.models.importing.layouts import unwrap
from components.models.importing.match import load_matching
from components.models.importing.read import read_checkpoint
from components.models.pixels import PixelModel
from components.models.places.registry import Loaded, ModelFacts
from components.models.pretrained import check_reachable, timm_network
from components.models.spec import ModelSpec

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
VIT = "ViTForImageClassification"
VIT_FUNCTION = {"hidden_act": "gelu", "qkv_bias": True}
FROM_DATA = ("img_size", "in_chans", "num_classes")  # arguments that the spec determines


class Repository(NamedTuple):
    """A repository on the hub at a revision; None: its newest."""

    name: str
    revision: str | None

    @classmethod
    def of(cls, text: str) -> "Repository":
        name, _, revision = text.partition("@")
        return cls(name, revision or None)

    def __str__(self) -> str:
        return f"hf:{self.name}" + (f"@{self.revision}" if self.revision else "")


def from_timm(name: str, given: ModelFacts, suggested: ModelFacts) -> Loaded:
    """timm's network of that name with its pretrained weights."""
    key = f"timm:{name}"
    if not timm.is_model(name):
        remedy = nearest_of(name, timm.list_models(), listing="casemate models --all '*'")
        raise CasemateError("model", key, remedy)
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        raise CasemateError("model", key, "has no pretrained weights in timm; choose another tag")
    spec = _spec_of(name, config.to_dict(), {}, origin=key)
    return Loaded(timm_network(name, key=("model", key)), spec)


def from_hugging_face(name: str, given: ModelFacts, suggested: ModelFacts) -> Loaded:
    """An image classifier of the hub: a network of timm, or a ViT of transformers."""
    repository = Repository.of(name)
    config = _json(repository, CONFIG)
    if "architecture" in config:
        for key, value in given.said().items():
            raise CasemateError(key, value, f"contradicts the config of {repository}; leave it out")
        return _timm_repository(repository, config)
    kinds = config.get("architectures") or [config.get("model_type") or "unknown model"]
    if VIT in kinds:
        return _vit(repository, config, given)
    remedy = (
        f"is a {kinds[0]} of transformers; of these only {VIT} is read: save it with torch.export "
        "and name the .pt2 file"
    )
    raise CasemateError("model", repository, remedy)


def _timm_repository(repository: Repository, config: Mapping[str, Any]) -> Loaded:
    """A network that timm describes; timm itself builds it and renames its tensors."""
    architecture, arguments = str(config["architecture"]), dict(config.get("model_args") or {})
    if not timm.is_model(architecture):
        raise CasemateError("model", repository, f"is a {architecture}, which timm does not know")
    folder = _first_file(repository, WEIGHTS).parent  # of the revision: config.json is beside it
    try:
        net = timm.create_model(f"local-dir:{folder}", pretrained=True)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise CasemateError("model", repository, f"timm fails: {first_line(error)}") from error
    described = dict(net.pretrained_cfg)
    channels, *sides = described["input_size"]
    if size := arguments.get("img_size"):
        sides = [size, size] if isinstance(size, int) else size
    described["input_size"] = [arguments.get("in_chans", channels), *sides]
    options = {key: value for key, value in arguments.items() if key not in FROM_DATA}
    return Loaded(net, _spec_of(architecture, described, options, origin=str(repository)))


def _vit(repository: Repository, config: Mapping[str, Any], given: ModelFacts) -> Loaded:
    """A ViT of transformers as timm's: its layer norms differ in an epsilon below 1e-6."""
    for key, wanted in VIT_FUNCTION.items():
        if config.get(key, wanted) != wanted:
            remedy = f"has {key} {config[key]}, its function is not that of timm's ViT"
            raise CasemateError("model", repository, remedy)
    mean, std = _statistics(repository, given)
    width = int(config.get("hidden_size", 768))
    tensors = read_checkpoint(_first_file(repository, WEIGHTS)).tensors
    weights = unwrap(tensors, layout="hf-vit")
    spec = ModelSpec(
        architecture="vit_base_patch16_224",
        num_classes=len(weights.state["head.weight"]),
        channels=int(config.get("num_channels", 3)),
        image_size=int(config.get("image_size", 224)),
        mean=mean,
        std=std,
        options={
            "patch_size": int(config.get("patch_size", 16)),
            "embed_dim": width,
            "depth": int(config.get("num_hidden_layers", 12)),
            "num_heads": int(config.get("num_attention_heads", 12)),
            "mlp_ratio": config.get("intermediate_size", 3072) / width,
        },
        trained_for={"loaded_from": str(repository)},
    )
    model = PixelModel(spec)
    origin, remedy = ("model", str(repository)), "its config describes another network"
    load_matching(model.net, weights.state, origin=origin, remedy=remedy)
    return Loaded(model.net, spec)


def _statistics(
    repository: Repository, given: ModelFacts
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation: as given, else those of the preprocessor."""
    found = {} if given.mean and given.std else _json(repository, PREPROCESSOR)
    values = []
    for key, written in (("mean", given.mean), ("std", given.std)):
        own = found.get(f"image_{key}")
        if written is None and (own is None or found.get("do_normalize") is False):
            neutral = [0.0 if key == "mean" else 1.0] * 3
            own = neutral if found.get("do_normalize") is False else None
        chosen = written if written is not None else own
        if chosen is None:
            raise CasemateError(key, "", f"is missing: {repository} does not say it")
        values.append(tuple(float(value) for value in chosen))
    return values[0], values[1]


def _spec_of(
    architecture: str, config: Mapping[str, Any], options: Mapping[str, Any], *, origin: str
) -> ModelSpec:
    """The spec of a network with timm's description of its weights."""
    channels, height, width = config["input_size"]
    if height != width:
        raise CasemateError("model", origin, f"takes images of {height}x{width}, not square ones")
    if not config.get("num_classes"):
        raise CasemateError("model", origin, "has no classes: it computes features only")
    for key in ("mean", "std"):
        if len(config[key]) != channels:
            remedy = f"has {channels} channels, but {len(config[key])} values of its {key}"
            raise CasemateError("model", origin, remedy)
    return ModelSpec(
        architecture=architecture,
        num_classes=int(config["num_classes"]),
        channels=int(channels),
        image_size=int(height),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        options=options,
        trained_for={"loaded_from": origin},
    )


def _json(repository: Repository, name: str) -> dict[str, Any]:
    path = _file(repository, name)
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CasemateError("model", repository, f"has a damaged {name}: {error}") from error
    return found


def _first_file(repository: Repository, names: tuple[str, ...]) -> Path:
    """The first of these files that the repository has."""
    for name in names[:-1]:
        try:
            return _file(repository, name)
        except _NoSuchFile:
            continue
    return _file(repository, names[-1])


def _file(repository: Repository, name: str) -> Path:
    """A file of a repository, from the cache if it is there."""
    with _refusals(repository, name):
        cached = try_to_load_from_cache(repository.name, name, revision=repository.revision)
        if isinstance(cached, str):
            return Path(cached)
        if not constants.HF_HUB_OFFLINE:
            check_reachable(constants.ENDPOINT, key=("model", str(repository)))
        return Path(hf_hub_download(repository.name, name, revision=repository.revision))


class _NoSuchFile(CasemateError):  # noqa: N818 - reads as the sentence it prints
    """The repository does not have the file."""


@contextmanager
def _refusals(repository: Repository, name: str) -> Iterator[None]:
    """Errors of the hub in one line."""
    key, shown = "model", str(repository)
    try:
        yield
    except GatedRepoError as error:
        raise CasemateError(key, shown, "needs your consent on its page, and HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise CasemateError(key, shown, "is not on the hub, or is private") from error
    except RevisionNotFoundError as error:
        raise CasemateError(key, shown, "is on the hub, but not in this revision") from error
    except LocalEntryNotFoundError as error:
        remedy = f"cannot be fetched from {constants.ENDPOINT}, and {name} is not in the cache"
        raise CasemateError(key, shown, remedy) from error
    except EntryNotFoundError as error:
        raise _NoSuchFile(key, shown, f"has no {name}; is it an image classifier?") from error
    except HFValidationError as error:
        raise CasemateError(key, shown, "is not of the form hf:ORG/NAME[@REVISION]") from error
    except OSError as error:
        raise CasemateError(key, shown, f"cannot be fetched: {first_line(error)}") from error
