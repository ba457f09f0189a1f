"""Recipes and runs: load, check and run recipes, read finished runs."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError, first_line
from components.core.folders import Folder, fetched, within
from components.core.secrets import redact
from pipelines.api.places import shown
from pipelines.api.tables import frame

if TYPE_CHECKING:
    import pandas as pd

    from pipelines.recipe.lint import LintWarning
    from pipelines.recipe.schema.recipe import Recipe
    from pipelines.runtime.stored_folder import StoredFolder
    from pipelines.stages.registry import Headline
    from pipelines.stages.tune.outcome import SearchOutcome

    RecipeSource = str | Path | Mapping[str, Any] | Recipe

DTYPE = "fp32"  # that an estimate assumes


def load_recipe(
    recipe: "RecipeSource", *, overrides: Sequence[str] = (), smoke: bool = False
) -> "Recipe":
    """A recipe from its name, a YAML path or plain values, with `key=value` overrides.

    >>> from pipelines import api
    >>> api.load_recipe("demo", overrides=["seed=3"]).seed
    3
    """
    from pipelines.recipe import load
    from pipelines.recipe.schema.recipe import Recipe

    if isinstance(recipe, str | Path):
        return load.load(str(recipe), overrides=overrides, smoke=smoke)
    if isinstance(recipe, Recipe):
        if not overrides and not smoke:
            return recipe
        text, source = recipe.to_yaml(), recipe.source
    elif isinstance(recipe, Mapping):
        import yaml

        try:
            text, source = yaml.safe_dump(_plain(recipe)), "recipe"
        except yaml.YAMLError as error:
            remedy = f"holds a value that YAML cannot write: {first_line(error)}"
            raise CasemateError("recipe", "", remedy) from error
    else:
        remedy = "is neither the name or path of a recipe nor a mapping of its values"
        raise CasemateError("recipe", repr(recipe), remedy)
    return load.loads(text, source=source, overrides=overrides, smoke=smoke)


def _plain(values: Any) -> Any:
    """Nested values with paths as text."""
    if isinstance(values, Mapping):
        return {key: _plain(inner) for key, inner in values.items()}
    if isinstance(values, list | tuple):
        return [_plain(inner) for inner in values]
    return str(values) if isinstance(values, Path) else values


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run: the folder of every step, the headline rows, report and tracking store.

    `tuned` is the best trial of its search, None without one.
    """

    steps: dict[str, Folder]
    summary: "list[Headline]"
    report: Path | None
    tracking_uri: str
    tuned: "SearchOutcome | None" = None

    @property
    def table(self) -> "pd.DataFrame":
        """The headline rows."""
        return frame(dict(row) for row in self.summary)


def run(
    recipe: "RecipeSource",
    *,
    storage: str | Path | None = None,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    force: bool = False,
    until: str | None = None,
    address: str | None = None,
    prepared: Folder | None = None,
) -> RunResult:
    """Run the unfinished steps of a recipe, here or on the Ray cluster at `address`.

    `until` names the stage to stop after, `force` runs finished steps again, `prepared` is a
    finished dataset in place of the recipe's own.

    >>> from pipelines import api
    >>> api.run("demo", smoke=True, storage="runs").table  # doctest: +SKIP
    """
    from pipelines.flow.run import run_flow
    from pipelines.flow.summary import folder_of, searched, summary
    from pipelines.runtime.storage import Storage
    from pipelines.runtime.tracking_uri import tracking_uri

    loaded = load_recipe(recipe, overrides=overrides, smoke=smoke)
    steps = run_flow(
        loaded, storage=storage, address=address, force=force, until=until, prepared=prepared
    )
    root = Storage.at(storage or loaded.storage.root)
    report = folder_of(steps, "report")
    return RunResult(
        steps={step.name: step.shown() for step in steps},
        summary=summary(steps),
        report=fetched(report) / "report.html" if report else None,
        tracking_uri=redact(tracking_uri(loaded.tracking, root)),
        tuned=searched(steps),
    )


def steps(storage: str | Path) -> "pd.DataFrame":
    """Every finished step of a storage (a folder or a URI), oldest first.

    >>> from pipelines import api
    >>> import tempfile
    >>> api.steps(tempfile.mkdtemp()).empty
    True
    """
    from pipelines.runtime.inventory import existing_storage, inventory

    columns = ["recipe", "step", "fingerprint", "files", "kB", "reads", "folder"]
    held = inventory(existing_storage(storage))
    rows = (
        {
            "recipe": step.recipe,
            "step": manifest.step,
            "fingerprint": manifest.fingerprint[:12],
            "files": len(manifest.files),
            "kB": sum(file["bytes"] for file in manifest.files.values()) // 1000,
            "reads": ", ".join(manifest.inputs),
            "folder": shown(step.place),
        }
        for step, manifest in held.finished()
    )
    return frame(rows).reindex(columns=columns)


def results(storage: str | Path) -> "pd.DataFrame":
    """The headline figures of all finished attacks and certificates of a storage.

    Only stored files are opened; user code that a recipe names is not imported.

    >>> from pipelines import api
    >>> import tempfile
    >>> list(api.results(tempfile.mkdtemp()).columns)[:4]
    ['recipe', 'step', 'model', 'what']
    """
    from pipelines.runtime.inventory import existing_storage, inventory
    from pipelines.stages.registry import STAGES, Step

    rows = []
    for stored, manifest in inventory(existing_storage(storage)).finished():
        stage, _, part = manifest.step.partition(".")
        if stage not in STAGES or not STAGES[stage].headlines:
            continue
        folder = stored.place.contents(manifest)
        identity = {stage: {"model": _model_name(folder)}}
        known = Step(stage, part, identity=identity)
        for row in STAGES[stage].steps().headlines([(known, folder)]):
            place = {"fingerprint": manifest.fingerprint[:12], "folder": shown(stored.place)}
            rows.append({"recipe": stored.recipe, "step": manifest.step, **row, **place})
    columns = [
        *("recipe", "step", "model", "what", "value", "low", "high", "num_items"),
        *("verdict", "reasons", "fingerprint", "folder"),
    ]
    return frame(rows).reindex(columns=columns)


def _model_name(folder: "StoredFolder") -> str:
    """The certified model: the input of the step with the digest in the certificate."""
    from components.models.checkpoint import read_header
    from pipelines.runtime.storage import input_of

    if "certificate.json" not in folder.files:
        return ""
    digest = json.loads((folder / "certificate.json").read_text())["evidence"]["model_digest"]
    inputs = folder.manifest.input_folders
    names = [name for name in inputs if name.startswith(("train.", "model."))]
    for name in names:
        with suppress(CasemateError):  # a model that is being made again
            place = input_of(folder, inputs[name])
            place = within(place, "model") if name.startswith("train.") else place
            if (place / "model.json").is_file() and read_header(place)["digest"] == digest:
                return name.partition(".")[2]
    return names[0].partition(".")[2] if len(names) == 1 else digest[:12]


def lint(
    recipe: "RecipeSource",
    *,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    address: str | None = None,
) -> "list[LintWarning]":
    """Warnings about probable mistakes in a valid recipe; raises if the recipe cannot work.

    `address`: of the cluster that it is meant for, whose GPUs are counted; nothing runs there.

    >>> from pipelines import api
    >>> api.lint("demo")
    []
    """
    from pipelines.recipe.lint import warnings_of

    num_gpus = None
    if address is not None:
        from pipelines.runtime.devices import gpus_at

        num_gpus = gpus_at(address)
    loaded = load_recipe(recipe, overrides=overrides, smoke=smoke)
    return warnings_of(loaded, num_gpus=num_gpus)


def estimate(
    recipe: "RecipeSource",
    *,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    accelerators: Sequence[str] = (),
    dtype: str = DTYPE,
    num_workers: int | None = None,
    num_items: int | None = None,
    num_train: int | None = None,
    withstand: float | None = None,
    passes_per_second: float | None = None,
    prices: Sequence[str] = (),
    measure: bool = False,
) -> list[dict[str, Any]]:
    """Cost of every step of a recipe: passes, FLOPs, memory, storage, hours on each accelerator.

    `withstand` is the share of items that no attack breaks: without it hours are a range. `prices`
    are per accelerator and hour, `2.5` or `A100=2.5`. With `measure` the steps' own passes are
    timed on this machine, on random images and weights; then the only place is `here`.

    >>> from pipelines import api
    >>> [row["step"] for row in api.estimate("demo", accelerators=["A100"])][1]
    'train.main'
    """
    from components.core.problems import named
    from pipelines.recipe.check import check
    from pipelines.recipe.costs import HERE, Hardware, Question, parse_prices, rows_of
    from pipelines.recipe.schema.recipe import Recipe
    from pipelines.stages.registry import STAGES

    _check_estimate(withstand, measure, {"accelerators": accelerators, "speed": passes_per_second})
    loaded = load_recipe(recipe, overrides=overrides, smoke=smoke)
    check(loaded)
    hardware = Hardware(
        accelerators=accelerators,
        dtype=dtype,
        num_workers=num_workers,
        passes_per_second=passes_per_second,
        prices=parse_prices(prices),
    )
    if idle := set(hardware.prices).difference({""}, hardware.places(), [HERE] * measure):
        remedy = "is the price of an accelerator that is not estimated; name it by --accelerator"
        raise CasemateError("--price", sorted(idle)[0], remedy)
    asked = Question(
        num_items=num_items, num_train=num_train, withstand=withstand, num_workers=num_workers
    )
    with named(loaded.source, Recipe.model_fields):
        costs = [cost for stage in STAGES.values() for cost in stage.cost().costs_of(loaded, asked)]
        if not measure:
            return rows_of(costs, hardware)
        from pipelines.flow.measure import measured_in
        from pipelines.runtime import progress

        with measured_in(loaded) as lab:
            return rows_of(costs, hardware, lab=lab, say=progress.say)


def _check_estimate(
    withstand: float | None, measure: bool, elsewhere: Mapping[str, object]
) -> None:
    if withstand is not None and not 0 <= withstand <= 1:
        raise CasemateError("--withstand", withstand, "is not a share; write a number in [0, 1]")
    for name, given in elsewhere.items():
        if measure and given:
            remedy = "cannot be combined with --measure, which times this machine"
            raise CasemateError("--measure", name, remedy)
