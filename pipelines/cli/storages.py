"""What a storage holds: `casemate runs`, and what may go from it: `casemate gc`."""

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines import api
from pipelines.api.storages import DAYS, default_storage
from pipelines.cli.amounts import age, size
from pipelines.cli.options import JsonOpt, StorageOpt

if TYPE_CHECKING:
    import pandas as pd

commands = typer.Typer()


@commands.command(epilog="Example: casemate runs demo --storage s3://bucket/runs")
def runs(
    name: Annotated[
        str | None, typer.Argument(metavar="[FLOW]", help="A flow, to list its steps.")
    ] = None,
    storage: StorageOpt = None,
    steps: Annotated[bool, typer.Option("--steps", help="List the steps of all flows.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """List the flows of a storage with state, size and age, or the steps of one."""
    is_fine = steps or name is not None
    found = api.flow_steps(name, storage) if is_fine else api.flows(storage)
    if as_json:
        print(json.dumps(_plain(found), indent=2))
    elif found.empty:
        print(f"{storage or default_storage()}: no flows")
    else:
        _show(_step_rows(found) if is_fine else _flow_rows(found))


def _plain(table: "pd.DataFrame") -> list[dict[str, object]]:
    """Rows of a table as JSON has them."""
    rows: list[dict[str, object]] = []
    for row in table.to_dict("records"):
        row |= {"changed": row["changed"].isoformat()}
        row |= {"folder": str(row["folder"])} if "folder" in row else {}
        rows.append({str(name): value for name, value in row.items()})
    return rows


def _flow_rows(table: "pd.DataFrame") -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("flow", "state", "steps", "size", "age")]
    for row in table.to_dict("records"):
        steps = f"{row['finished']}/{row['begun']}"
        passed = age(time.time() - row["changed"].timestamp())
        rows.append((row["flow"], row["state"], steps, size(row["bytes"]), passed))
    return rows


def _step_rows(table: "pd.DataFrame") -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("step", "state", "forced", "size", "unfinished", "old", "age")]
    for row in table.to_dict("records"):
        amounts = [_given(row[k]) for k in ("bytes", "unfinished_bytes", "earlier_bytes")]
        place = f"{row['flow']}/{row['step']}-{row['fingerprint']}"
        passed = age(time.time() - row["changed"].timestamp())
        rows.append((place, row["state"], str(row["generation"] or "-"), *amounts, passed))
    return rows


def _given(number: int) -> str:
    return size(number) if number else "-"


def _show(rows: Sequence[Sequence[str]]) -> None:
    """A table: words to the left, amounts (from the third column on) to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            f"{cell:<{width}}" if column < 2 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


@commands.command(epilog="Example: casemate gc --storage runs --older-than 30 --delete")
def gc(
    storage: StorageOpt = None,
    delete: Annotated[bool, typer.Option("--delete", help="Remove; default: list only.")] = False,
    older_than: Annotated[
        float,
        typer.Option(metavar="DAYS", min=0, help="Keep unfinished steps changed since then."),
    ] = DAYS,
    as_json: JsonOpt = False,
) -> None:
    """List or remove what no finished step needs: old generations, given-up work, leftovers."""
    found = api.gc(storage, delete=delete, older_than=older_than)
    rows = found.records()
    if as_json:
        total = {"deleted": delete, "files": found.num_files, "bytes": found.bytes}
        print(json.dumps({**total, "garbage": rows, "kept": list(found.kept)}, indent=2))
        return
    head = ("place", "reason", "files", "size")
    if rows:
        _show([head, *((r["place"], r["reason"], str(r["files"]), size(r["bytes"])) for r in rows)])
    for note in found.kept:
        print(f"kept: {note}")
    print(f"{storage or default_storage()}: {_total(found)}")


def _total(found: api.Cleanup) -> str:
    if not found.num_files:
        return "nothing was removed" if found.deleted else "nothing to remove"
    amount = f"{size(found.bytes)} in {found.num_files} files"
    if found.deleted:
        return f"{amount} removed"
    return f"{amount} could be removed; --delete removes them"
