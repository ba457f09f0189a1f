"""Results of several runs against model size."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from components.core.object_stores import is_uri
from pipelines.api.outputs import output_file
from pipelines.api.tables import frame

if TYPE_CHECKING:
    import pandas as pd

    from components.evaluate.across_runs import Benchmark
    from components.evaluate.metrics import MetricRow
    from components.evaluate.scaling import ScalingFit

FORMATS = (".html", ".svg")
STORED = re.compile(r"/files/[0-9a-f]{20}/")  # of all generations: the step shows the current one


@dataclass(frozen=True, slots=True)
class Scaling:
    """Error against parameters: for each benchmark one fit per family and pre-training set."""

    panels: "dict[Benchmark, list[ScalingFit]]"
    rows: "list[MetricRow]"
    """The numbers of all runs; models are named by their recipes."""
    files: tuple[Path, ...]
    page: Path | None = None

    @property
    def table(self) -> "pd.DataFrame":
        """One row per fit: slope and intercept with 95 % intervals, or the reason if none."""
        return frame(self.records())

    def records(self) -> list[dict[str, Any]]:
        """The rows of `table` as plain values."""
        return [
            {
                "suite": benchmark.suite,
                "item": benchmark.item,
                "metric": benchmark.metric,
                "family": fit.family,
                "pretrain": fit.pretrain,
                "num_models": len(fit.points),
                "slope": fit.slope,
                "slope_low": fit.slope_interval[0] if fit.slope_interval else None,
                "slope_high": fit.slope_interval[1] if fit.slope_interval else None,
                "intercept": fit.intercept,
                "why_not": fit.why_not,
            }
            for benchmark, fits in self.panels.items()
            for fit in fits
        ]


def scaling(
    paths: Sequence[str | Path],
    *,
    suites: Sequence[str] = (),
    out: str | Path | None = None,
) -> Scaling:
    """Fit error against the number of parameters, from the evaluations of several runs.

    `paths` are metrics.parquet files, or folders that hold some: steps, runs, whole storages; or
    URIs of steps and storages.
    `suites` restricts the benchmarks; `out` is written as a page (.html) or as its chart (.svg).
    """
    from components.evaluate.across_runs import SUITES, benchmarks_of, merged
    from components.evaluate.metrics import read_metrics
    from components.evaluate.scaling import scaling_fits

    for name in suites:
        if name not in SUITES:
            raise CasemateError("suite", name, f"is unknown; choose from {', '.join(SUITES)}")
    target = None if out is None else output_file(out, FORMATS)
    files = _metrics_files(paths)
    rows = merged({place: read_metrics(path) for place, path in files.items()})
    benchmarks = benchmarks_of(rows, suites=suites)
    panels = {
        b: fits
        for b in benchmarks
        if (fits := scaling_fits(rows, suite=b.suite, item=b.item, metric=b.metric, level=b.level))
    }
    if not panels:
        what = f"of {', '.join(suites)} " if suites else ""
        remedy = f"has no accuracy {what}of models with known family and size"
        raise CasemateError("scaling", ", ".join(map(str, paths)), remedy)
    found = Scaling(panels, rows, tuple(files.values()), target)
    if target is not None:
        _write(found, target, files)
    return found


def _metrics_files(paths: Sequence[str | Path]) -> dict[str, Path]:
    """Every file once, by its path or URI, sorted."""
    from components.evaluate.metrics import METRICS_NAME

    if not paths:
        raise CasemateError("scaling", "", "needs files or folders with metrics.parquet")
    found: dict[str, Path] = {}
    for given in paths:
        path = Path(given).expanduser()
        if is_uri(str(given)):
            own = _stored_metrics(str(given))
        elif path.is_file():
            own = {str(path): path}
        elif not path.is_dir():
            raise CasemateError("scaling", path, "does not exist")
        else:
            shown = (p for p in path.rglob(METRICS_NAME) if not STORED.search(p.as_posix()))
            own = {str(p): p for p in shown}
        if not own:
            remedy = f"has no {METRICS_NAME}; casemate evaluate writes it"
            raise CasemateError("scaling", given, remedy)
        found |= own
    return dict(sorted(found.items()))


def _stored_metrics(uri: str) -> dict[str, Path]:
    """Files of one step, or of all finished steps of a storage, by their URIs."""
    from components.evaluate.metrics import METRICS_NAME
    from pipelines.runtime.inventory import existing_storage, inventory
    from pipelines.runtime.storage import STEP_URI, step_at

    if STEP_URI.fullmatch(uri.rstrip("/")):
        folders = [step_at(uri)]
    else:
        held = inventory(existing_storage(uri, key="scaling"))
        folders = [step.place.contents(manifest) for step, manifest in held.finished()]
    holding = [folder for folder in folders if METRICS_NAME in folder.files]
    return {f"{folder}/{METRICS_NAME}": folder / METRICS_NAME for folder in holding}


def _write(found: Scaling, path: Path, files: Mapping[str, Path]) -> None:
    """The page, or its chart as a file of its own."""
    from components.core.digests import digest_file
    from components.core.files import atomic
    from components.report.content import Fact
    from components.report.evaluation.scaling import scaling_chapter, scaling_page
    from components.report.page import render

    if path.suffix == ".svg":
        (chart,) = scaling_chapter(found.panels).charts
        text = chart.svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    else:
        sources = [
            Fact("/".join(place.split("/")[-2:]), digest_file(file), code=True)
            for place, file in files.items()
        ]
        content = scaling_page(
            found.panels, found.rows, title="Error against size", provenance=sources
        )
        text = render(content)
    with atomic(path) as temporary:
        temporary.write_bytes(text.encode())
