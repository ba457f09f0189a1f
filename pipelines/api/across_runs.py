"""Results of several runs against model size."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from pipelines.api.tables import frame

if TYPE_CHECKING:
    import pandas as pd

    from components.evaluate.across_runs import Benchmark
    from components.evaluate.metrics import MetricRow
    from components.evaluate.scaling import ScalingFit

FORMATS = (".html", ".svg")


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

    `paths` are metrics.parquet files, or folders that hold some: steps, runs, whole storages.
    `suites` restricts the benchmarks; `out` is written as a page (.html) or as its chart (.svg).
    """
    from components.evaluate.across_runs import SUITES, benchmarks_of, merged
    from components.evaluate.metrics import read_metrics
    from components.evaluate.scaling import scaling_fits

    for name in suites:
        if name not in SUITES:
            raise CasemateError("suite", name, f"is unknown; choose from {', '.join(SUITES)}")
    target = _checked_output(out)
    files = _metrics_files(paths)
    rows = merged({str(path): read_metrics(path) for path in files})
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
    found = Scaling(panels, rows, files, target)
    if target is not None:
        _write(found, target)
    return found


def _checked_output(out: str | Path | None) -> Path | None:
    if out is None:
        return None
    path = Path(out).expanduser()
    if path.suffix not in FORMATS:
        raise CasemateError("out", out, f"ends in neither {FORMATS[0]} nor {FORMATS[1]}")
    if not path.parent.is_dir():
        raise CasemateError("out", out, f"cannot be written: {path.parent} is not a folder")
    return path


def _metrics_files(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    """Every file once, sorted."""
    from components.evaluate.metrics import METRICS_NAME

    if not paths:
        raise CasemateError("scaling", "", "needs files or folders with metrics.parquet")
    found: list[Path] = []
    for path in (Path(given).expanduser() for given in paths):
        if path.is_file():
            found.append(path)
        elif not path.is_dir():
            raise CasemateError("scaling", path, "does not exist")
        elif own := sorted(path.rglob(METRICS_NAME)):
            found += own
        else:
            remedy = f"has no {METRICS_NAME}; casemate evaluate writes it"
            raise CasemateError("scaling", path, remedy)
    return tuple(sorted(set(found)))


def _write(found: Scaling, path: Path) -> None:
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
        files = [
            Fact(f"{file.parent.name}/{file.name}", digest_file(file), code=True)
            for file in found.files
        ]
        content = scaling_page(
            found.panels, found.rows, title="Error against size", provenance=files
        )
        text = render(content)
    with atomic(path) as temporary:
        temporary.write_bytes(text.encode())
