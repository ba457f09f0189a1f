"""Commands around certificates: `casemate estimate` and `casemate export-tsv`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines import api
from pipelines.api.runs import DTYPE
from pipelines.cli.amounts import size
from pipelines.cli.options import JsonOpt, RecipeArg, SetOpt, SmokeOpt

commands = typer.Typer()


@commands.command(epilog="Example: casemate estimate svit-in1k-col19-vit-s --accelerator A100")
def estimate(
    recipe: RecipeArg,
    set_: SetOpt = None,
    smoke: SmokeOpt = False,
    accelerator: Annotated[
        list[str] | None, typer.Option(help="One per worker, e.g. A100; default: all known.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, tf32, fp16 or bf16.")] = DTYPE,
    workers: Annotated[int, typer.Option(help="Number of workers.", min=1)] = 1,
    items: Annotated[
        int | None, typer.Option(help="Test items, if the recipe does not set them.", min=1)
    ] = None,
    passes_per_second: Annotated[
        float | None,
        typer.Option(
            help="Measured on your device, instead of an accelerator; for l2 certificates draws "
            "per second: a draw is all passes of the denoiser and one of the classifier."
        ),
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """Estimate the cost of suites and certificates: passes, FLOPs, hours and memory."""
    rows = api.estimate(
        recipe,
        overrides=set_ or [],
        smoke=smoke,
        accelerators=accelerator or [],
        dtype=dtype,
        num_workers=workers,
        num_items=items,
        passes_per_second=passes_per_second,
    )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        _show(row)


def _show(row: dict[str, Any]) -> None:
    if row["step"].startswith(("evaluate.", "analyze.")):
        _show_suite(row)
    else:
        _show_certificate(row)
    for place in row["hours"]:
        tight = "" if place["fits"] else ", memory may not fit: lower micro_batch"
        print(
            f"  {place['where']:<9} {_time(place['low'], place['high'])} ({place['rate']}){tight}"
        )


def _show_suite(row: dict[str, Any]) -> None:
    least, most = row["least_passes"], row["passes"]
    passes = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    gradients = f", {row['gradients']:,} with gradients" if row["gradients"] else ""
    seconds = f", {row['cpu_seconds']:,.3g} CPU seconds of corruption" if row["cpu_seconds"] else ""
    print(
        f"{row['step']}: {row['num_items']:,} items, {row['num_models']} model(s), {passes} passes"
        f"{gradients}, {row['flops']:.3g} FLOPs{seconds}, "
        f"memory of a worker {size(row['device_bytes'])} at most"
    )


def _show_certificate(row: dict[str, Any]) -> None:
    votes = {"draw": "draws", "pass": "passes"}[row["each"]]
    print(
        f"{row['step']}: {row['num_items']:,} items, {row['passes']:,} {votes}, "
        f"{row['flops']:.3g} FLOPs, votes {size(row['votes_bytes'])}, "
        f"memory of a worker {size(row['device_bytes'])} at most"
    )


def _time(low: float, high: float) -> str:
    """Hours, or a smaller unit if the longer time is below one hour."""
    unit, name = next((u for u in ((1, "h"), (60, "min")) if high * u[0] >= 1), (3600, "s"))
    longest = f"{high * unit:.3g}" if high * unit >= 0.1 else "under 0.1"
    shortest = f"{low * unit:.3g} to " if low < high and high * unit >= 0.1 else ""
    return f"{shortest}{longest} {name}"


@commands.command(
    "export-tsv", epilog="Example: casemate export-tsv runs/demo/certify.l2-1f2e3d4c5b6a"
)
def export_tsv(
    path: Annotated[str, typer.Argument(help="Folder of an l2 certificate, or its URI.")],
    out: Annotated[Path | None, typer.Option(help="File to write; default: PATH.tsv.")] = None,
    as_json: JsonOpt = False,
) -> None:
    """Write the radii of an l2 certificate as the per-image table of Cohen et al. 2019."""
    written = api.export_tsv(path, out)
    if as_json:
        print(json.dumps({"file": str(written.path), "num_items": written.num_items}, indent=2))
    else:
        print(f"{written.path}: {written.num_items} items")
