"""`casemate leaderboard`: all verified results, ranked."""

import json
import sys
from collections.abc import Sequence
from math import ceil, floor
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import typer

from pipelines import api
from pipelines.cli.options import JsonOpt, StoragesOpt, SuspectOpt

commands = typer.Typer()
COLUMNS = ("rank", "range", "model", "accuracy", "95%", "clean", "ties with", "verdict")
MOST_TIES = 3  # that a line names
LONGEST = 150  # characters of a setting


@commands.command(
    epilog="Example: casemate leaderboard --storage runs --out board.html --out board.json"
)
def leaderboard(
    storage: StoragesOpt = None,
    tracking: Annotated[
        str | None, typer.Option(metavar="URI", help="MLflow's store instead: all its runs.")
    ] = None,
    allow_suspect: SuspectOpt = False,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Page (.html) or data in RobustBench's fields (.json); repeatable.",
        ),
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """Rank all verified results by dataset, items, threat, budget and protocol; mark ties."""
    found = api.leaderboard(
        storage or (),
        tracking=tracking,
        allow_suspect=allow_suspect,
        out=out or (),
        progress=_progress if sys.stderr.isatty() else None,
    )
    document = found.records()
    if as_json:
        print(json.dumps(document, indent=2))
        return
    for board in document["boards"]:
        _show(board)
    for one in document["left_out"]:
        print(f"left out: {one['place']}: {one['why']}")
    for path in found.files:
        print(f"written: {path}")


def _progress(text: str) -> None:
    print(f"casemate: {text}", file=sys.stderr, flush=True)


def _show(board: dict[str, Any]) -> None:
    """One board: what its results share, and a line for each."""
    from components.report.leaderboard import protocol_words

    dataset = f"{board['dataset'] or 'dataset'} {board['dataset_digest'][:12]}"
    few = " only, which hardly tell models apart" if board["small"] else ""
    print(f"{board['board']}: {board['kind']}, {dataset}, {board['num_items']} items{few}")
    for name, words in protocol_words(board["protocol"]).items():
        print(f"  {name}: {shorten(words, LONGEST, placeholder=' ...')}")
    rows = [COLUMNS, *(_line(entry) for entry in board["entries"])]
    used = [i for i in range(len(COLUMNS)) if any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    for row in rows:
        print("  " + "  ".join(f"{row[i]:<{widths[i]}}" for i in used).rstrip())
    print()


def _shown(entry: dict[str, Any]) -> str:
    """The share as on every page: a proven one, which is cut off, has one decimal."""
    share = str(entry["reported"])
    return share[:-1] if entry["kind"] == "proven" else share


def _line(entry: dict[str, Any]) -> tuple[str, ...]:
    share, best, worst = entry["accuracy"], entry["rank_at_best"], entry["rank_at_worst"]
    return (
        "-" if entry["rank"] is None else str(entry["rank"]),
        "" if best is None else f"{best}-{worst}",
        entry["label"],
        f"{_shown(entry)} %",
        f"[{floor(1000 * share['low']) / 10}, {ceil(1000 * share['high']) / 10}]",  # outwards
        entry["clean_acc"] if entry["kind"] != "measured" else "",
        _named(entry["ties"]),
        entry["footnote"] or entry["verdict"],
    )


def _named(names: Sequence[str]) -> str:
    more = len(names) - MOST_TIES
    return ", ".join(names[:MOST_TIES]) + (f" and {more} more" if more > 0 else "")
