"""Recipes: the only door for YAML. One file says everything about a result."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from components.core.digests import digest_json
from components.core.errors import CasemateError
from pipelines import sections as s
from pipelines.hints import did_you_mean

RECIPES = Path(__file__).parent / "recipes"
# Errors about several keys at once: their message names the keys itself.
RULES = (
    *("path", "fractions", "hopeless", "blocks", "main", "tune", "certify", "model"),
    *("scales", "curves", "threat", "train"),
)
OPEN = ("num_items", "train_items", "num_steps", "num_queries", "max_batches")  # None means many
MAIN = "main"  # the model of `train.objective`; variants have names of their own


class Recipe(s.Section):
    """Everything about a result; `cluster`, `storage` and `tracking` only say where it is made."""

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
        if self.certify and not self.train:
            raise PydanticCustomError("certify", "certify: needs a train section that makes models")
        for key, model in users:
            if model not in names:
                raise PydanticCustomError(
                    "model",
                    "{key}: {model} {hint}",
                    {"key": key, "model": model, "hint": did_you_mean(model, names)},
                )
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

    def objective_of(self, model: str) -> s.Objective:
        """The training objective of a model of this recipe."""
        assert self.train is not None
        return self.train.objective if model == MAIN else self.train.variants[model].objective

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
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def headline(name: str) -> str:
    """What a ready recipe is, from the first comment line of its file."""
    first = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()


def find(name_or_path: str) -> Path:
    """The file of a ready recipe's name or of a path."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        if not path.is_file():
            raise CasemateError("recipe", path, "is not a file; check the path")
        return path
    if name_or_path in available():
        return RECIPES / f"{name_or_path}.yaml"
    raise CasemateError("recipe", name_or_path, did_you_mean(name_or_path, available()))


def load(name_or_path: str, *, overrides: Sequence[str] = (), smoke: bool = False) -> Recipe:
    """A validated recipe from a ready name or a YAML path, with `key=value` overrides applied."""
    path = find(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CasemateError("recipe", path, f"cannot be read as UTF-8 text: {error}") from error
    return loads(text, source=str(path), overrides=overrides, smoke=smoke)


def loads(text: str, *, source: str, overrides: Sequence[str] = (), smoke: bool = False) -> Recipe:
    """The same from YAML text; `source` is what errors name."""
    try:
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader), source=source)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise CasemateError("recipe", source, f"is not valid YAML: {_one_line(error)}") from error
    if not isinstance(values, dict):
        raise CasemateError("recipe", source, "must be a mapping with at least `name` and `data`")
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
        mistakes = [_explain(values, e["loc"], e) for e in error.errors(include_url=False)]
        (key, value, remedy), *rest = mistakes
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
    section[slot] = value


def shrink(recipe: Recipe) -> Recipe:
    """`--smoke`: the same chain on few items, draws and steps; seconds instead of hours."""
    values = recipe.resolved()
    limits = {"train": 192, "val": 48, "test": 24}
    given = values["data"]["limits"]
    values["data"]["limits"] = {k: min(v, given.get(k, v)) for k, v in limits.items()}
    if values["model"]["architecture"].startswith("tiny_"):
        values["model"]["options"] |= {"depth": 2, "embed_dim": 32, "num_heads": 2}
    caps = {
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
        "num_select": 20,
        "num_estimate": 200,
        "num_positions": 2,
        "num_draws": 4,
        "num_predict": 50,
        "block_size": 100,
        "micro_batch": 50,
        "train_items": 96,
        "grace_epochs": 1,
        "num_queries": 50,
        "num_targets": 2,
        "num_restarts": 2,
        "num_angles": 3,
    }
    for section in ("train", "tune", "attack", "certify"):
        _cap(values[section], caps)
    for certify in values["certify"].values():
        if "block_size" in certify:  # stays a multiple of the micro batch, which was capped too
            certify["block_size"] -= certify["block_size"] % certify["micro_batch"]
    for attack in values["attack"].values():
        if attack["curves"]:
            steps = attack["curves"]["steps"]
            attack["curves"]["steps"] = sorted({min(n, caps["num_steps"]) for n in steps})
    return parse(values, source=f"{recipe.name} --smoke")


def _cap(values: object, caps: Mapping[str, int]) -> None:
    """Lower every listed number inside nested values to its cap; what was left open gets it."""
    for inner in values if isinstance(values, list) else ():
        _cap(inner, caps)
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        if key in caps and isinstance(value, int):
            values[key] = min(value, caps[key])
        elif key in OPEN and value is None:
            values[key] = caps[key]
        else:
            _cap(value, caps)


def _explain(values: Any, loc: tuple[int | str, ...], error: Any) -> tuple[str, str, str]:
    """(key path, value, remedy) of one pydantic error, without pydantic's union tags."""
    path: list[str] = []
    for part in loc:
        if _holds(values, part):
            values = values[part]
        elif error["type"] != "missing" or part != loc[-1]:
            continue  # the tag of a union, not a key
        path.append(str(part))
    if error["type"] == "unknown_key":
        unknown = error["ctx"]["key"]  # as text; YAML also makes keys like `on` into True
        value = next(v for k, v in values.items() if str(k) == unknown)
        return ".".join([*path, unknown]), repr(value), error["msg"]
    if error["type"] == "missing":
        return ".".join(path), "", "is missing; write it"
    key = ".".join(path)
    if error["type"] in RULES:
        return (key or "recipe"), "", error["msg"]
    message = error["msg"][0].lower() + error["msg"][1:]
    return key, repr(values), message if message.startswith("is ") else f"is wrong: {message}"


def _holds(values: Any, part: int | str) -> bool:
    if isinstance(values, list):
        return isinstance(part, int) and part < len(values)
    return isinstance(values, Mapping) and part in values


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
