"""A first recipe for a user's images: look at them, write a commented recipe that runs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from components.core.files import write_text
from pipelines.api.outputs import OUT, output_file

if TYPE_CHECKING:
    from components.data.inspection import Inspected
    from components.models.spec import ModelSpec
    from pipelines.recipe.starting.facts import Start

DEFAULT_TASK, DEFAULT_DATA = "train", "digits"
WITH_MODEL = ("attack", "certify")
ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class StartedRecipe:
    """A recipe that was written, what was found, and what is strange about it."""

    file: Path
    task: str
    text: str
    found: Mapping[str, Any]
    notices: tuple[str, ...]


def init(
    task: str = DEFAULT_TASK,
    *,
    data: str | Path | None = None,
    model: str | Path | None = None,
    out: str | Path | None = None,
    force: bool = False,
    look: int | None = None,
) -> StartedRecipe:
    """Look at images and write a commented recipe for a task: attack, certify, train or tune.

    `data` is a folder, a file, or the name of a source that needs no files; by default the digits
    that come with scikit-learn. `model` is the folder of a finished model to attack or certify.
    At most `look` images are decoded; 0: all. An existing file is overwritten with `force` only.

    >>> from pipelines import api
    >>> import tempfile
    >>> made = api.init("attack", out=tempfile.mkdtemp() + "/mine.yaml")
    >>> made.found["classes"], api.lint(made.file)
    (10, [])
    """
    from components.data.inspection import inspect, oddities
    from components.data.sources.recognition import recognise
    from pipelines.recipe.starting.facts import doubts

    _check_arguments(task, model, look)
    target = None if out is None else _target(out, force=force)  # before minutes of reading
    try:
        inspected = inspect(recognise(str(data or DEFAULT_DATA)), **_at_most(look))
    except CasemateError as error:
        if error.key != "data.path":  # of recipes
            raise
        raise CasemateError("--data", error.value, error.remedy) from error
    begun = _begun(task, inspected, model)
    name = _name(task, inspected, target)
    target = target or _target(f"{name}.yaml", force=force)
    notices = (*oddities(inspected), *doubts(begun))
    text = _checked_text(begun, name, target, notices)
    try:
        write_text(target, text)
    except OSError as error:
        raise CasemateError(OUT, target, f"cannot be written: {error.strerror}") from error
    return StartedRecipe(target, task, text, _found(inspected, begun), notices)


def _at_most(look: int | None) -> dict[str, int]:
    return {} if look is None else {"most": look or 2**62}


def _check_arguments(task: str, model: str | Path | None, look: int | None) -> None:
    from pipelines.recipe.starting.facts import TASKS

    if task not in TASKS:
        raise CasemateError("--task", task, f"is unknown; choose {', '.join(TASKS)}")
    if model is not None and task not in WITH_MODEL:
        remedy = (
            f"does not apply to {task}; to train on from it, set model.pretrained in the recipe"
        )
        raise CasemateError("--model", model, remedy)
    if look is not None and look < 0:
        raise CasemateError("--look", look, "must be at least 0")


def _target(out: str | Path, *, force: bool) -> Path:
    """The file to write; a file that is there is never lost without `force`."""
    path = output_file(out, ENDINGS)
    if path.exists() and not force:
        raise CasemateError(OUT, out, "exists; --force overwrites it, --out names another file")
    return path


def _begun(task: str, inspected: "Inspected", model: str | Path | None) -> "Start":
    from pipelines.recipe.starting.facts import start, start_from_model

    if model is None:
        return start(task, inspected)  # type: ignore[arg-type]
    folder, spec = _given(str(model))
    return start_from_model(task, inspected, folder=folder, spec=spec)  # type: ignore[arg-type]


def _given(model: str) -> "tuple[str, ModelSpec]":
    """The folder of a finished model: what a recipe can name."""
    from components.core.folders import absolute, folder_at
    from components.models.checkpoint import read_header
    from components.models.places.registry import FOLDER, find_place, folder_of
    from components.models.spec import ModelSpec

    place, name = find_place(model)
    if place is not FOLDER:
        remedy = "is not a model folder, which a recipe needs; `casemate attack --model`"
        raise CasemateError("--model", model, f"{remedy} and `certify --model` take it as it is")
    folder = folder_at(absolute(folder_of(name)))
    spec = ModelSpec.from_dict(read_header(folder)["spec"], source=str(folder / "model.json"))
    return absolute(folder), spec


def _name(task: str, inspected: "Inspected", target: Path | None) -> str:
    """The recipe's name: that of its file, else of task and data."""
    data = Path(inspected.path).stem if inspected.path else inspected.source
    for words in (target.stem if target else "", f"{task}-{data}", task):
        if name := re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-"):
            return name
    raise AssertionError


def _checked_text(begun: "Start", name: str, target: Path, notices: tuple[str, ...]) -> str:
    """The text of a recipe that the gate accepts without a warning."""
    from pipelines.recipe.commented import commented_yaml
    from pipelines.recipe.gpus import local_gpus
    from pipelines.recipe.lint import warnings_of
    from pipelines.recipe.load import loads
    from pipelines.recipe.starting.sections import sections

    keys = sections(begun, name=name, gpus=local_gpus() > 0)
    text = commented_yaml(keys, head=_head(begun, target, notices))
    found = warnings_of(loads(text, source=str(target)))
    if found:  # of places that are not reached from here
        first = found[0]
        raise CasemateError(first.key, target, f"{first.message}; nothing was written")
    return text


def _head(begun: "Start", target: Path, notices: tuple[str, ...]) -> list[str]:
    data = begun.data
    items = f"{data.num_items} images in {len(data.classes)} classes"
    splits = ", ".join(f"{name} {count}" for name, count in begun.splits.items())
    return [
        f"A first recipe to {begun.task} models of {begun.side} px, written by `casemate init`.",
        f"Data:   {data.path or data.source}: {items}; splits: {splits}",
        *(f"Note:   {notice}" for notice in notices),
        f"Check:  casemate lint {target.name}",
        f"Try:    casemate run {target.name} --smoke      the whole chain on few images",
        f"Run:    casemate run {target.name}",
        "Comments with `found:` say what the images showed; other values are the usual ones.",
        f"All keys with their defaults: casemate recipes ./{target.name}",
    ]


def _found(inspected: "Inspected", begun: "Start") -> dict[str, Any]:
    sizes = inspected.sizes
    height, width = sizes.mean
    return {
        "source": inspected.source,
        "path": inspected.path,
        "options": inspected.options,
        "because": inspected.because,
        "num_items": inspected.num_items,
        "num_looked_at": inspected.num_looked_at,
        "classes": len(inspected.classes),
        "class_counts": inspected.class_counts,
        "native_splits": inspected.splits,
        "splits": dict(begun.splits),
        "num_sizes": len(sizes.shapes),
        "mean_size": [round(height, 1), round(width, 1)],
        "shorter_side": [sizes.shorter(0), sizes.shorter(0.5), sizes.shorter(1)],
        "channels": list(inspected.channels),
        "unreadable": sorted(inspected.unreadable),
        "image_size": begun.side,
        "fit": begun.fitted.fit,
    }
