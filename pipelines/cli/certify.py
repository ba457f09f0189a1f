"""Commands around certificates: `casemate certify` and `export-tsv`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from components.core.errors import CasemateError
from pipelines import api
from pipelines.cli.given_model import Section, model_command
from pipelines.cli.options import (
    CertificateArg,
    Flag,
    JsonOpt,
    NumItemsOpt,
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
