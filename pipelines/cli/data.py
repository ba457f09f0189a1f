"""`casemate data`: lists datasets and downloads public ones."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from components.core.folders import Folder, folder_at
from components.core.object_stores import is_uri
from pipelines import api
from pipelines.cli.options import JsonOpt

_NAMES = "cifar10, cifar100, mnist, fashion_mnist, flowers102, caltech101 or imagenette."


class _ShowsByDefault(TyperGroup):
    """`casemate data NAME` is `casemate data show NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        if first not in (*self.commands, "--help"):
            args = ["show", *args]
        return super().parse_args(ctx, args)


commands = typer.Typer()
_data = typer.Typer(cls=_ShowsByDefault)
commands.add_typer(
    _data,
    name="data",
    help="List the datasets that recipes can use, show one, show a prepared one, or download one.",
    epilog="Example: casemate data imagenet      casemate data get cifar10 --to data/cifar10",
)


@_data.command(epilog="Example: casemate data get cifar10 --to data/cifar10")
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help=_NAMES)],
    to: Annotated[Path, typer.Option(metavar="DIR", help="Folder for it; made if missing.")],
    as_json: JsonOpt = False,
) -> None:
    """Download a public dataset, verified by its published checksums, to where its source reads it.

    Nothing is downloaded if a whole copy is there; a damaged one is named.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "60")  # bars of torchvision: a line a minute
    found = api.get_data(name, to, report=lambda line: print(line, file=sys.stderr))
    if as_json:
        print(json.dumps(found.facts(), indent=2))
        return
    state = "was complete" if found.was_there else "downloaded"
    counts = ", ".join(f"{split} {count:,}" for split, count in found.splits.items())
    total = sum(found.splits.values())
    print(f"{name}: {total:,} items ({counts}), {len(found.classes)} classes, {state}, verified")
    print(found.recipe_lines, end="")


@_data.command(epilog="Example: casemate data imagenet")
def show(
    name: Annotated[
        str | None, typer.Argument(help="Show this source, or this prepared folder, in full.")
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """List the datasets that recipes can use, show one, or show the contents of a prepared one."""
    from components.data.sources import all_sources, find_source

    if name and (is_uri(name) or (Path(name) / "dataset.json").is_file()):
        found = _prepared(folder_at(name))
        print(json.dumps(found, indent=2) if as_json else _prepared_text(found))
        return
    if name:
        facts = find_source(name).facts()
        print(json.dumps(facts, indent=2) if as_json else _source_text(facts))
        return
    rows = [info.facts() for info in all_sources()]
    print(json.dumps(rows, indent=2) if as_json else "\n".join(_line(row) for row in rows))


def _line(facts: dict[str, Any]) -> str:
    classes = f"{facts['classes']} classes" if facts["classes"] else "any classes"
    items = f"{facts['num_items']:,} items" if facts["num_items"] else ""
    size = facts["image_size"]
    return f"{facts['name']:<16} {classes:<13} {size:<11} {items:<16} {facts['title']}"


def _source_text(facts: dict[str, Any]) -> str:
    splits = facts["splits"] or {}
    counts = ", ".join(f"{split} {count:,}" for split, count in splits.items())
    lines = {
        "source": facts["name"],
        "title": facts["title"],
        "classes": facts["classes"] or "as in the files",
        "image size": facts["image_size"],
        "items": counts or "as in the files",
        "use": "evaluation only: all items are test items" if facts["test_only"] else "",
        "data.path": facts["path"] or "none: the data come with an installed package",
        "used by": ", ".join(facts["used_by"]),
    }
    lines |= {f"data.options.{key}": text for key, text in facts["options"].items()}
    width = max(map(len, lines))
    return "\n".join(f"{key:<{width}}  {value}" for key, value in lines.items() if value)


def _prepared(folder: Folder) -> dict[str, Any]:
    """Contents of a prepared dataset: every shard is read by Ray, with bounded memory."""
    from components.data.prepared import PreparedDataset
    from pipelines.recipe.schema.place import ClusterSection
    from pipelines.runtime.cluster import ray_cluster
    from pipelines.runtime.streams import dataset_statistics

    dataset = PreparedDataset.open(folder)
    with ray_cluster(ClusterSection()):
        splits = {
            name: dataset_statistics(folder, name)
            for name, count in dataset.splits.items()
            if count
        }
    return {
        "folder": str(folder),
        "digest": dataset.digest,
        "classes": list(dataset.classes),
        "image": [dataset.channels, dataset.height, dataset.width],
        "splits": splits,
    }


def _prepared_text(found: dict[str, Any]) -> str:
    channels, height, width = found["image"]
    lines = [f"{len(found['classes'])} classes, {channels} x {height} x {width}, {found['digest']}"]
    for name, split in found["splits"].items():
        counts = split["class_counts"].values()
        lines.append(
            f"{name:<10} {split['num_items']:>9,} items, {min(counts)} to {max(counts)} per class, "
            f"mean {_rounded(split['channel_mean'])}, std {_rounded(split['channel_std'])}"
        )
    return "\n".join(lines)


def _rounded(values: list[float]) -> str:
    return " ".join(f"{value:.4f}" for value in values)
