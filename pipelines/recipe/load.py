"""Recipes: the only door for YAML. One file says everything about a result."""

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from components.core.digests import digest_json
from components.core.errors import CasemateError
from pipelines.recipe import schema as s
from pipelines.recipe import smoke as smoking
from pipelines.recipe.explain import explain
from components.core.hints import did_you_mean, nearest_of

RECIPES = Path(__file__).parents[1] / "recipes"
EXTENDS = "extends"  # a recipe whose values hold where this one says nothing
logger = logging.getLogger("casemate.recipe")  # without a handler: one line on stderr

MAIN = "main"  # the model of `train.objective`; variants have names of their own


class Recipe(s.Section):
    """Everything about a result; `cluster`, `storage` and `tracking` only say where it is made."""

    further_keys: ClassVar[tuple[str, ...]] = (EXTENDS,)

    name: s.Name
    seed: Annotated[int, Field(ge=0)] = 0
    data: s.DataSection
    model: s.ModelSection = s.ModelSection()
    train: s.TrainSection | None = None
    tune: s.TuneSection | None = None
    attack: dict[s.Name, s.AttackSection] = Field(default={})
    certify: dict[s.Name, s.Certify] = Field(default={})
    report: s.ReportSection = s.ReportSection()
    cluster: s.ClusterSection = s.ClusterSection()
    storage: s.StorageSection = s.StorageSection()
    tracking: s.TrackingSection = s.TrackingSection()

    @model_validator(mode="after")
    def _models_exist(self) -> Self:
        users = [(f"attack.{k}.models", m) for k, a in self.attack.items() for m in a.models]
        users += [
            (f"attack.{k}.surrogate", a.surrogate) for k, a in self.attack.items() if a.surrogate
        ]
        users += [(f"certify.{k}.model", c.model) for k, c in self.certify.items()]
        names = self.model_names()
        if MAIN in (self.train.variants if self.train else {}):
            raise PydanticCustomError(
                "main", "train.variants: main is the name of train.objective's model"
            )
        if self.tune and not self.train:
            raise PydanticCustomError("tune", "tune: needs a train section to vary")
        if self.certify and not names:
            raise PydanticCustomError(
                "certify",
                "certify: needs a train section that makes models, or model.pretrained: a folder",
            )
        for key, model in users:
            if model not in names:
                raise PydanticCustomError(
                    "model",
                    "{key}: {model} {hint}",
                    {"key": key, "model": model, "hint": did_you_mean(model, names)},
                )
        return self

    @model_validator(mode="after")
    def _certificates_differ_in_name(self) -> Self:
        names = [name for k, c in self.certify.items() for name in s.certify_entries(k, c)]
        for name in names:
            if names.count(name) > 1:
                remedy = f"two sections make a certificate called {name}; rename one"
                raise PydanticCustomError("certify", f"certify: {remedy}")
        return self

    @model_validator(mode="after")
    def _denoisers_fit(self) -> Self:
        denoisers = self.denoisers()
        for key, certify in self.certify.items():
            behind = self.certified_behind(certify)
            if behind is not None and behind not in denoisers:
                remedy = "is no variant with objective kind: denoiser, nor diffusers:PATH"
                raise PydanticCustomError("model", f"certify.{key}.denoiser: {behind} {remedy}")
        if self.train is None:
            if s.is_on_disk(self.model.pretrained or ""):
                remedy = "is a denoiser; a given model is a classifier's folder"
                raise PydanticCustomError("model", f"model.pretrained: {remedy}")
            return self
        for name in self.model_names():
            key = "train" if name == MAIN else f"train.variants.{name}"
            section = self.model_of(name)
            architecture = section.architecture
            start = section.pretrained or ""
            plain = s.ModelSection(
                architecture=architecture, options=section.options, pretrained=section.pretrained
            )
            if name in denoisers and section != plain:
                remedy = "takes architecture, options and pretrained alone; pixels are the data's"
                raise PydanticCustomError("model", f"{key}.model: a denoiser {remedy}")
            if start and (name in denoisers) != s.is_on_disk(start):
                wanted = "diffusers:PATH or model:PATH" if name in denoisers else "timm or a folder"
                kind = "a denoiser" if name in denoisers else "a classifier"
                remedy = f"is no start for {kind}; write {wanted}"
                raise PydanticCustomError("model", f"{key}.model.pretrained: {start} {remedy}")
            if (name in denoisers) != (architecture in s.ARCHITECTURES):
                wanted = "a denoiser" if name in denoisers else "a classifier"
                remedy = f"is no network for {wanted}; denoisers are {', '.join(s.ARCHITECTURES)}"
                raise PydanticCustomError("model", f"{key}.model: {architecture} {remedy}")
            behind = self.denoiser_of(name)
            if behind is not None and behind not in denoisers:
                remedy = "is no variant with objective kind: denoiser, nor diffusers:PATH"
                raise PydanticCustomError("model", f"{key}.objective.denoiser: {behind} {remedy}")
        used = [(f"attack.{k}.models", m) for k, a in self.attack.items() for m in a.models]
        used += [(f"certify.{k}.model", c.model) for k, c in self.certify.items()]
        for key, name in used:
            if name in denoisers:
                raise PydanticCustomError("model", f"{key}: {name} is a denoiser, no classifier")
        return self

    def model_names(self) -> list[str]:
        """The models that the train section makes, `main` first; without it the given one."""
        if self.train:
            return [MAIN, *self.train.variants]
        return [MAIN] if self.given_model() else []

    def given_model(self) -> Path | None:
        """The folder of a model that is used as it is: pretrained, and nothing trains it."""
        start = self.model.pretrained
        return None if self.train or start in (None, "timm") else Path(start).expanduser()

    def certificates(self) -> dict[str, s.CertifyEntry]:
        """Every certificate that is asked for: sections as they are, sweeps entry by entry."""
        return {n: e for k, c in self.certify.items() for n, e in s.certify_entries(k, c).items()}

    def objective_of(self, model: str) -> s.Objective:
        """The training objective of a model of this recipe."""
        assert self.train is not None
        return self.train.objective if model == MAIN else self.train.variants[model].objective

    def model_of(self, model: str) -> s.ModelSection:
        """The architecture of a model of this recipe: its own, else the recipe's."""
        variant = self.train.variants.get(model) if self.train else None
        return (variant.model if variant else None) or self.model

    def denoisers(self) -> list[str]:
        """The models that estimate images instead of telling classes apart."""
        if self.train is None:
            return []
        made = [(name, self.objective_of(name)) for name in self.model_names()]
        return [name for name, own in made if isinstance(own, s.DenoiserObjective)]

    def denoiser_of(self, model: str) -> str | None:
        """The model of this recipe that a model is trained behind, if there is one."""
        own = self.objective_of(model)
        if not isinstance(own, s.DenoisedObjective) or s.is_on_disk(own.denoiser):
            return None
        return own.denoiser

    def certified_behind(self, section: s.Certify) -> str | None:
        """The model of this recipe that denoises for a certificate, if there is one."""
        behind = section.denoiser if isinstance(section, s.GaussianCertify) else None
        return None if behind is None or s.is_on_disk(behind) else behind

    def epochs_of(self, model: str) -> int:
        """How many epochs a model of this recipe is trained for."""
        assert self.train is not None
        variant = self.train.variants.get(model)
        return (variant.epochs if variant else None) or self.train.epochs

    def resolved(self) -> dict[str, Any]:
        """Plain values with every default written out."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """Identity of what the recipe computes; where it runs is left out."""
        return digest_json(self.model_dump(mode="json", exclude={"cluster", "storage", "tracking"}))

    def to_yaml(self) -> str:
        """The resolved recipe as a YAML that `casemate run` accepts."""
        return yaml.safe_dump(self.resolved(), sort_keys=False)

    def with_values(self, changes: Mapping[str, Any]) -> "Recipe":
        """This recipe with dotted keys replaced, validated anew."""
        values = self.resolved()
        for key, value in changes.items():
            set_key(values, key, value)
        return parse(values, source=self.name)


def _refuse_repeated_keys(node: yaml.Node | None, *, source: str, path: str = "") -> None:
    """YAML lets a repeated key win silently; we refuse it."""
    if isinstance(node, yaml.SequenceNode):
        for number, inner in enumerate(node.value):
            _refuse_repeated_keys(inner, source=source, path=f"{path}{number}.")
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, inner in node.value:
        here = f"{path}{key.value}"
        if here in seen:
            line = f"on line {key.start_mark.line + 1}"
            raise CasemateError(f"{source}: {here}", line, "is written twice; keep one")
        seen.add(here)
        _refuse_repeated_keys(inner, source=source, path=f"{here}.")


def available() -> list[str]:
    """Names of the ready recipes: the folder is the registry."""
    return sorted(_ready())


def _ready() -> dict[str, Path]:
    return {path.stem: path for path in RECIPES.rglob("*.yaml")}


def headline(name: str) -> str:
    """What a ready recipe is, from the first comment line of its file."""
    first = _ready()[name].read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()


def find(name_or_path: str, *, key: str = "recipe", base: Path = Path()) -> Path:
    """The file of a ready recipe's name, or of a path as seen from `base`."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        path = base / path
        if not path.is_file():
            raise CasemateError(key, path, "is not a file; check the path")
        return path
    ready = _ready()
    if name_or_path in ready:
        return ready[name_or_path]
    raise CasemateError(
        key, name_or_path, nearest_of(name_or_path, ready, listing="casemate recipes")
    )


def load(name_or_path: str, *, overrides: Sequence[str] = (), smoke: bool = False) -> Recipe:
    """A validated recipe from a ready name or a YAML path, with `key=value` overrides applied."""
    path = find(name_or_path)
    return loads(_text(path), source=str(path), overrides=overrides, smoke=smoke, base=path.parent)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CasemateError("recipe", path, f"cannot be read as UTF-8 text: {error}") from error


def _values(text: str, *, source: str, base: Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The plain values of a recipe's text, on top of those of the recipe that it extends."""
    try:
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader), source=source)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise CasemateError("recipe", source, f"is not valid YAML: {_one_line(error)}") from error
    if not isinstance(values, dict):
        raise CasemateError("recipe", source, "must be a mapping with at least `name` and `data`")
    if EXTENDS not in values:
        return values
    key, parent = f"{source}: {EXTENDS}", values.pop(EXTENDS)
    if not isinstance(parent, str):
        raise CasemateError(key, parent, "is no ready recipe's name and no YAML path")
    path = find(parent, key=key, base=base).resolve()
    if path in below:
        raise CasemateError(key, parent, "leads back to itself; recipes extend in one direction")
    extended = _values(_text(path), source=str(path), base=path.parent, below=(*below, path))
    extended.pop("name", None)  # two recipes of one name would share their folders
    return merged(extended, values)


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `under`, section by section.

    Lists are replaced whole, and so are sections of another `kind`, whose keys are not shared. A
    null takes an inherited section or list away, unless it has a meaning of its own.
    """
    result = deepcopy(dict(under))
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            same = value.get("kind", below.get("kind")) == below.get("kind")
            result[key] = merged(below, value) if same else value
        elif value is None and isinstance(below, Mapping | list) and key not in s.keys_with_off():
            del result[key]
        else:
            result[key] = value
    return result


def loads(
    text: str,
    *,
    source: str,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    base: Path = Path(),
) -> Recipe:
    """The same from YAML text; errors name `source`, paths of `extends` are seen from `base`."""
    values = _values(text, source=source, base=base)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise CasemateError("--set", override, "is not key=value, e.g. --set train.epochs=2")
        try:
            set_key(values, key.strip(), yaml.safe_load(value))
        except yaml.YAMLError as error:
            raise CasemateError(
                f"--set {key}", value, f"is not a YAML value: {_one_line(error)}"
            ) from error
    recipe = parse(values, source=source)
    return shrink(recipe) if smoke else recipe


def parse(values: Mapping[str, Any], *, source: str) -> Recipe:
    """Validate plain values; every mistake becomes one line `source: key: value remedy`."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        (key, value, remedy), *rest = explain(Recipe, values, error)
        more = "".join(f"\n{CasemateError(f'{source}: {k}', v, r)}" for k, v, r in rest)
        raise CasemateError(f"{source}: {key}", value, remedy + more) from None


def set_key(values: dict[str, Any], key: str, value: object) -> None:
    """Set a dotted key in nested mappings, making missing ones; numbers point into lists."""
    place: Any = values
    parts = key.split(".")
    for above, part in zip(["recipe", *parts], parts, strict=False):
        if isinstance(place, list) and part.isdigit():
            slot: Any = int(part)
            if slot >= len(place):
                remedy = f"cannot be set: there are {len(place)} entries, numbered from 0"
                raise CasemateError(f"--set {key}", value, remedy)
        elif isinstance(place, dict):
            slot = part
        else:
            raise CasemateError(f"--set {key}", value, f"cannot be set: `{above}` is not a section")
        section = place
        if isinstance(place, dict) and place.get(slot) is None:
            place[slot] = {}
        place = place[slot]
    section[slot] = deepcopy(value)  # a later key may point inside: the caller keeps his own


def shrink(recipe: Recipe) -> Recipe:
    """`--smoke`: the same chain in seconds; says what it put in the place of something else."""
    values = recipe.resolved()
    if notes := smoking.shrink(values):
        logger.warning("smoke: %s", "; ".join(notes))
    return parse(values, source=f"{recipe.name} --smoke")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
