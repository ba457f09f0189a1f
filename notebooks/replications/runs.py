"""Pages made from finished runs of a recipe, one per seed: counts, file and command.

A study reads its counts from the folders of finished steps, stores one line for each in
`<name>.jsonl`, and makes `<name>.md` and `<name>.svg` from that file alone.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from components.core.errors import CasemateError
from components.evaluate.metrics import MetricRow
from notebooks.replications import page
from pipelines.flow.plan import PlannedStep, plan
from pipelines.recipe.schema.recipe import Recipe

RESULTS = Path(__file__).resolve().parents[1] / "results"
SEEDS = (0, 1, 2)
Line = dict[str, Any]  # counts of one part of one seed


@dataclass(frozen=True, slots=True)
class Lines:
    """Counts of all seeds."""

    lines: Sequence[Line]

    def find(self, **where: Any) -> list[Line]:
        """The lines with these values, one per seed and in their order."""
        found = [x for x in self.lines if all(x.get(k) == value for k, value in where.items())]
        found.sort(key=lambda line: line["seed"])
        if [line["seed"] for line in found] != self.seeds:
            raise ValueError(f"{where} does not have one line for each of the seeds {self.seeds}")
        return found

    @property
    def seeds(self) -> list[int]:
        return sorted({line["seed"] for line in self.lines})


@dataclass(frozen=True, slots=True)
class Study:
    """Parts of a page; `run` and `collect` take the storage of the runs and a seed."""

    name: str
    run: Callable[[Path, int], object]
    collect: Callable[[Path, int], Sequence[Line]]
    render: Callable[[Sequence[Line]], str]
    draw: Callable[[Sequence[Line]], Figure]


def finished(step: PlannedStep) -> Path:
    """The folder of a finished step."""
    if not step.finished:
        raise CasemateError("storage", step.folder, "is not finished; add --run")
    return step.folder


def certificates(
    recipe: Recipe, storage: Path
) -> Iterator[tuple[PlannedStep, Path, dict[str, Any]]]:
    """Every certificate of a finished run: its step, its folder, its document."""
    for step in plan(recipe, storage):
        if step.step.stage == "certify":
            folder = finished(step)
            yield step, folder, json.loads((folder / "certificate.json").read_text())


def value_of(
    rows: Sequence[MetricRow], suite: str, item: str, metric: str, *, level: float | None = None
) -> float:
    """The only number of `metrics.parquet` with this name, of one level if it is given."""
    named = [r for r in rows if (r.suite, r.item, r.metric) == (suite, item, metric)]
    (row,) = [r for r in named if level in (None, r.level)]
    if row.value is None:
        raise CasemateError(suite, f"{item} {metric}", ", ".join(row.flags))
    return row.value


def read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(study: Study, *, description: str | None) -> None:
    """`python -m notebooks.replications.<name>`."""
    prog = f"python -m notebooks.replications.{study.name}"
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--storage", type=Path, help="finished runs; default: the counts kept here")
    parser.add_argument("--run", action="store_true", help="run what the storage lacks")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of counts and page")
    given = parser.parse_args()
    if given.run and not given.storage:
        parser.error("--run needs --storage, the folder of the runs")
    try:
        _make(study, given)
    except CasemateError as error:
        parser.exit(2, f"{prog}: {error}\n")


def _make(study: Study, given: argparse.Namespace) -> None:
    """With `--run` the runs, then counts if there are runs, then the page and its picture."""
    for seed in SEEDS if given.run else ():
        study.run(given.storage, seed)
    path = given.out / f"{study.name}.jsonl"
    if given.storage:
        found = [line for seed in SEEDS for line in study.collect(given.storage, seed)]
        given.out.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in found))
    lines = read(path)
    path.with_suffix(".svg").write_text(page.svg(study.draw(lines)))
    path.with_suffix(".md").write_text(study.render(lines))
