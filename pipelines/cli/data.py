"""`casemate data`: lists datasets."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from components.core.folders import Folder, folder_at
from components.core.object_stores import is_uri
from pipelines.cli.options import JsonOpt

commands = typer.Typer()


@commands.command(epilog="Example: casemate data imagenet")
def data(
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
