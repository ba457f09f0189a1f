"""The command that lists architectures: `casemate models`."""

import json
from typing import Annotated, Any

import typer

from components.core.errors import CasemateError
from pipelines.cli.options import JsonOpt

commands = typer.Typer()


@commands.command(epilog="Example: casemate models 'xcit_*_p16_224' --json")
def models(
    name: Annotated[
        str | None,
        typer.Argument(help="A name or a glob; other names are looked up in timm."),
    ] = None,
    everywhere: Annotated[
        str | None,
        typer.Option("--all", metavar="PATTERN", help="A glob over all names of timm."),
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """List architectures with their parameters, multiply-accumulates and memory per image."""
    from components.models import catalog

    if name and everywhere:
        raise CasemateError("--all", everywhere, f"takes no NAME; leave out {name}")
    found = catalog.find_everywhere(everywhere) if everywhere else catalog.find(name or "*")
    rows = [catalog.describe(entry) for entry in found]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'name':<30}{'params':>9}{'GFLOPs':>9}{'kept MB':>9}{'pixels':>8}  drop scale papers")
    for row in rows:
        print(_line(row))
    if name and (more := catalog.num_everywhere(name) - len(rows)):
        print(f"{more} more in timm: casemate models --all '{name}'")


def _line(row: dict[str, Any]) -> str:
    millions, giga = row["params"] / 1e6, row["flops"] / 1e9
    drop, scale = ("yes" if row[key] else "no" for key in ("drops_tokens", "scales_attention"))
    return (
        f"{row['name']:<30}{millions:>8.2f}M{giga:>9.3f}{row['activation_bytes'] / 1e6:>9.1f}"
        f"{row['image_size']:>8}  {drop:<4} {scale:<5} {', '.join(row['papers'])}"
    ).rstrip()
