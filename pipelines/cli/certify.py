"""Commands around certificates: `casemate certify`, `estimate` and `export-tsv`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from components.core.errors import CasemateError
from pipelines import api
from pipelines.api.runs import DTYPE
from pipelines.cli.amounts import size
from pipelines.cli.given_model import Section, model_command
from pipelines.cli.options import (
    CertificateArg,
    Flag,
    JsonOpt,
    NumItemsOpt,
    RecipeArg,
    SetOpt,
    SmokeOpt,
    flag,
    numbers,
    with_flags,
)

commands = typer.Typer()
EXAMPLE = (
    "Example: casemate certify demo   Without a recipe: casemate certify --model models/deit-s "
    "--data imagenet --data-path imagenet --patch-sizes 32 --band 19 --stride 10   or --sigma 0.25 "
    "--denoiser diffusers:ddpm --num-estimate 10000"
)
PATCH = ("patch_sizes", "kind", "band", "stride")  # options of each certificate, first its own
L2 = ("sigma", "radii", "num_estimate", "denoiser")
FLAGS = {
    "patch_sizes": Flag(str, "Patches: sides in pixels, with commas, e.g. 2,4."),
    "kind": Flag(str, "Patches: columns, rows, blocks, both, double_masking; default: columns."),
    "band": Flag(int, "Patches: visible pixels; default: as the model was trained."),
    "stride": Flag(int, "Patches: of the ablations, in pixels."),
    "sigma": Flag(str, "l2: deviation of the noise, e.g. 0.25."),
    "radii": Flag(str, "l2: radii with commas; default: those of recipes."),
    "num_estimate": Flag(int, "l2: draws per item; default: as in recipes."),
    "denoiser": Flag(str, "l2: diffusers:DIR or model:DIR, before the model."),
}


@with_flags(FLAGS)
def _section(_: list[str], num_items: NumItemsOpt = None, **given: Any) -> Section:
    """A certificate against patches, one in an l2 ball, or both."""
    given["patch_sizes"] = _whole_numbers("--patch-sizes", given["patch_sizes"])
    given["radii"] = numbers("--radii", given["radii"])
    found: Section = {}
    for name, keys, kind_ in (("patch", PATCH, "columns"), ("l2", L2, "gaussian")):
        chosen = {key: given[key] for key in keys if given[key] is not None}
        if keys[0] in chosen:
            entry = {"kind": kind_, **chosen, "num_items": num_items}
            found[name] = {k: list(v) if isinstance(v, tuple) else v for k, v in entry.items()}
        elif chosen:
            key, value = next(iter(chosen.items()))
            raise CasemateError(flag(key), value, f"needs {flag(keys[0])}")
    if not found:
        remedy = "is missing; certify against patches with it, or in an l2 ball with --sigma"
        raise CasemateError("certify", "--patch-sizes", remedy)
    return found


def _whole_numbers(key: str, text: str | None) -> tuple[int, ...] | None:
    found = numbers(key, text)
    if found is not None and any(value != int(value) for value in found):
        raise CasemateError(key, text, "is not a comma-separated list of whole numbers")
    return None if found is None else tuple(int(value) for value in found)


certify = model_command("certify", _section)


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
    path: CertificateArg,
    out: Annotated[Path | None, typer.Option(help="File to write; default: PATH.tsv.")] = None,
    as_json: JsonOpt = False,
) -> None:
    """Write the radii of an l2 certificate as the per-image table of Cohen et al. 2019."""
    written = api.export_tsv(path, out)
    if as_json:
        print(json.dumps({"file": str(written.path), "num_items": written.num_items}, indent=2))
    else:
        print(f"{written.path}: {written.num_items} items")
