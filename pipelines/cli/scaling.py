"""`casemate scaling`: error against model size, from the evaluations of several runs."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from components.core.errors import CasemateError
from pipelines import api
from pipelines.cli.options import JsonOpt, names_in

commands = typer.Typer()


@commands.command(epilog="Example: casemate scaling runs --suite clean,corruptions")
def scaling(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH...",
            help="metrics.parquet files, or folders of steps or runs with some; URIs of steps or "
            "storages.",
        ),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(metavar="A,B", help="Suites to show; default: all that were run.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Page to write (.html), or its chart alone (.svg).")
    ] = Path("scaling.html"),
    as_json: JsonOpt = False,
) -> None:
    """Fit error against the number of parameters, per family and pre-training set."""
    if not paths:
        raise CasemateError("scaling", "", "needs files or folders with metrics.parquet")
    found = api.scaling(paths, suites=names_in(suite), out=out)
    if as_json:
        print(json.dumps({"page": str(out), "fits": found.records()}, indent=2))
        return
    for row in found.records():
        print(_line(row))
    print(f"page: {out}")


def _line(row: dict[str, Any]) -> str:
    item = "" if row["item"] == "all" else f" {row['item']}"
    pretrain = f", {row['pretrain']}" if row["pretrain"] else ""
    head = f"{row['suite']}{item} {row['metric']}: {row['family']}{pretrain}"
    if row["slope"] is None:
        return f"{head}: no line: {row['why_not']}"
    interval = f"95% [{row['slope_low']:.3f}, {row['slope_high']:.3f}]"
    return f"{head}: slope {row['slope']:.3f} {interval}, {row['num_models']} models"
