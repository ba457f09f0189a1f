"""`casemate estimate`: what a recipe costs before it runs."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from pipelines import api
from pipelines.api.runs import DTYPE
from pipelines.cli.amounts import size
from pipelines.cli.options import JsonOpt, RecipeArg, SetOpt, SmokeOpt

commands = typer.Typer()
Row = dict[str, Any]
DRAWS = {"draw": " draws"}
UNITS = ((1, "h"), (60, "min"), (3600, "s"))
EXAMPLES = (
    "Example: casemate estimate svit-in1k-col19-vit-s --accelerator A100 --price 2.5   "
    "or, by the speed of this machine: casemate estimate demo --smoke --measure"
)


@commands.command(epilog=EXAMPLES)
def estimate(
    recipe: RecipeArg,
    set_: SetOpt = None,
    smoke: SmokeOpt = False,
    accelerator: Annotated[
        list[str] | None, typer.Option(help="One per worker, e.g. A100; default: all known.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time the steps' own passes on this machine instead.")
    ] = False,
    price: Annotated[
        list[str] | None,
        typer.Option(help="Of an accelerator and hour: 2.5, or A100=2.5; default: no money."),
    ] = None,
    withstand: Annotated[
        float | None,
        typer.Option(help="Share of items that no attack breaks; default: a range, none to all."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, tf32, fp16 or bf16.")] = DTYPE,
    workers: Annotated[
        int | None, typer.Option(help="Workers of each step; default: 1, or as the recipe.", min=1)
    ] = None,
    items: Annotated[
        int | None, typer.Option(help="Test items, if the recipe does not set them.", min=1)
    ] = None,
    train_items: Annotated[
        int | None, typer.Option(help="Training items, if the recipe does not set them.", min=1)
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
    """Estimate the cost of every step: passes, hours, memory, storage, and money at your price."""
    rows = api.estimate(
        recipe,
        overrides=set_ or [],
        smoke=smoke,
        accelerators=accelerator or [],
        dtype=dtype,
        num_workers=workers,
        num_items=items,
        num_train=train_items,
        withstand=withstand,
        passes_per_second=passes_per_second,
        prices=price or [],
        measure=measure,
    )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print("\n".join(lines(rows)))


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Two tables, of amounts and of times, then what they hold for."""
    from pipelines.recipe.costs import totals

    known = [row for row in rows if not row.get("unknown")]
    yield from _table(_amounts(known), left=1)
    yield ""
    yield from _table(_times(known, list(totals(known))), left=1)
    for row in known:
        for place in row["hours"]:
            if not place["fits"]:
                need = size(row["device_bytes"])
                yield f"{row['step']}: {need} may not fit {place['where']}: lower micro_batch"
    yield ""
    yield from _sources(known)
    for row in rows:
        if why := row.get("unknown"):
            yield f"{row['step']}: not estimated: {why}"
        for text in row.get("assumed", ()):
            yield f"{row['step']}: {text}"


def _amounts(rows: Sequence[Row]) -> list[list[str]]:
    head = ["step", "items", "passes", "FLOPs", "memory", "storage", "files"]
    table = [head]
    for row in rows:
        table.append(
            [
                row["step"],
                f"{row['num_items']:,}" if row["num_items"] else "",
                _passes(row),
                f"{row['flops']:.2g}" if row["flops"] else "",
                size(row["device_bytes"]) if row["device_bytes"] else "",
                size(row["storage_bytes"]),
                f"{row['objects']:,}",
            ]
        )
    sums = [sum(row[name] for row in rows) for name in ("flops", "storage_bytes", "objects")]
    table.append(["all", "", "", f"{sums[0]:.2g}", "", size(sums[1]), f"{sums[2]:,}"])
    return table


def _passes(row: Row) -> str:
    if not row["passes"]:
        return ""
    return _between(row["least_passes"], row["passes"]) + DRAWS.get(row.get("each", ""), "")


def _times(rows: Sequence[Row], sums: Sequence[Row]) -> list[list[str]]:
    """Times of one column per place; of this machine also the processor's."""
    here = any(total["where"] == "here" for total in sums)
    if here:
        table = [["time here", "by the clock", "of the processor"]]
        for row in rows:
            (place,) = row["hours"]
            table.append([row["step"], *_here(place)])
        table.append(["all, one after the other", *_here(sums[0])])
    else:
        table = [["time on", *(total["where"] for total in sums)]]
        for row in rows:
            own = {place["where"]: time_of(place["low"], place["high"]) for place in row["hours"]}
            table.append([row["step"], *(own.get(total["where"], "") for total in sums)])
        table.append(["all", *(time_of(total["low"], total["high"]) for total in sums)])
    device = [time_of(total["device_hours_low"], total["device_hours_high"]) for total in sums]
    table.append(["device time" if here else "accelerator time", *device])
    if any("cost_low" in total for total in sums):
        money = [
            _money(total["cost_low"], total["cost_high"]) if "cost_low" in total else ""
            for total in sums
        ]
        table.append(["money", *money])
    width = len(table[0])
    return [[*cells, *[""] * (width - len(cells))] for cells in table]


def _money(low: float, high: float) -> str:
    first, last = f"{low:,.2f}", f"{high:,.2f}"
    return last if first == last else f"{first}-{last}"


def _here(place: Row) -> list[str]:
    return [
        time_of(place["low"], place["high"]),
        time_of(place["cpu_low"], place["cpu_high"]),
    ]


def _sources(rows: Sequence[Row]) -> Iterator[str]:
    """Where the speeds come from, each once."""
    found: dict[str, None] = {}
    for row in rows:
        for part in row["parts"]:
            if rate := part.get("rate"):
                found[f"{row['step']}: {part['what']}: {_speed(part['seconds'])}, {rate}"] = None
        for place in row["hours"]:
            if place["where"] != "here" and row["flops"]:
                found[f"{place['where']}: {place['rate']}"] = None
    yield from sorted(found) if not any("here" in text for text in found) else found


def _speed(seconds: float) -> str:
    """Time of a pass of one image."""
    scale, unit = next(
        (s, u) for s, u in ((1, "s"), (1e3, "ms"), (1e6, "us")) if seconds * s >= 1 or u == "us"
    )
    return f"{seconds * scale:.3g} {unit} a pass"


def time_of(low: float, high: float) -> str:
    """Hours, or a smaller unit if the longer time is below one hour."""
    if high == 0:
        return "-"
    unit, name = next((u for u in UNITS if high * u[0] >= 1), UNITS[-1])
    if high * unit < 0.1:
        return "< 0.1 s"
    return f"{_between(low * unit, high * unit, short=True)} {name}"


def _between(low: float, high: float, *, short: bool = False) -> str:
    """One number, or two."""
    first, last = (_digits(value) if short else f"{value:,}" for value in (low, high))
    return last if first == last else f"{first}{'-' if short else ' to '}{last}"


def _digits(value: float) -> str:
    """Two digits, or all of a larger number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _table(rows: Sequence[Sequence[str]], *, left: int) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        padded = [
            f"{cell:<{width}}" if place < left else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        yield "  ".join(padded).rstrip()
