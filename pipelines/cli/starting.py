"""`casemate init`: a first recipe for one's own images."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines import api
from pipelines.api.starting import DEFAULT_TASK
from pipelines.cli.options import JsonOpt

if TYPE_CHECKING:
    from pipelines.api.starting import StartedRecipe

commands = typer.Typer()


@commands.command(epilog="Example: casemate init --task train --data my-images")
def init(
    task: Annotated[
        str, typer.Option(metavar="T", help="attack, certify, train or tune.")
    ] = DEFAULT_TASK,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|SOURCE",
            help="Folder of images, .npz, Parquet, CIFAR or IDX files, a prepared dataset; or a "
            "source without files. Default: digits.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Finished model to attack or certify, as a folder."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Recipe to write; default: TASK-DATA.yaml, here.")
    ] = None,
    look: Annotated[
        int | None, typer.Option(help="Images to decode at most; default: 2000, 0: all.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Look at your images and write a commented recipe that lints clean and runs."""
    made = api.init(task, data=data, model=model, out=out, force=force, look=look)
    if as_json:
        found = {
            "recipe": str(made.file),
            "task": made.task,
            "found": made.found,
            "notices": list(made.notices),
        }
        print(json.dumps(found, indent=2))
        return
    _show(made)


def _show(made: "StartedRecipe") -> None:
    for key, value in _rows(made.found).items():
        print(f"{key:<8} {value}")
    for notice in made.notices:
        print(f"note     {notice}")
    name = shlex.quote(str(made.file))
    print(f"recipe   {made.file}")
    print(f"next     casemate run {name} --smoke     (seconds), then without --smoke")


def _rows(found: Any) -> dict[str, str]:
    channels = " and ".join({1: "grey", 3: "colour"}[number] for number in found["channels"])
    height, width = found["mean_size"]
    many = f"{found['num_sizes']} sizes, on average " if found["num_sizes"] > 1 else ""
    fitted = f"{found['fit']} to {found['image_size']}"
    splits = ", ".join(f"{name} {count}" for name, count in found["splits"].items())
    return {
        "data": f"{found['path'] or found['source']}: {found['because']}",
        "source": f"{found['source']}, {found['num_items']} images, {found['classes']} classes",
        "images": f"{many}{height:g}x{width:g}, {channels}; {fitted}",
        "splits": splits,
    }
