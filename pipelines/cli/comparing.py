"""`casemate compare`: several models, item by item."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.core.errors import CasemateError
from components.core.shares import points, share_line
from pipelines import api
from pipelines.api.comparisons import nothing_compared
from pipelines.cli.options import JsonOpt, NamesOpt, TrackingOpt, names_in

if TYPE_CHECKING:
    from components.evaluate.comparison import Comparison, Share

commands = typer.Typer()
PlacesArg = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[LABEL=]PLACE...",
        help="Flows, steps, certificates, model folders (paths or URIs); mlflow:RUN_ID.",
    ),
]


@commands.command(epilog="Example: casemate compare base=runs/a new=runs/b --out comparison.html")
def compare(
    places: PlacesArg = None,
    names: NamesOpt = None,
    storage: Annotated[
        str | None, typer.Option(metavar="DIR|URI", help="Where results of models are searched.")
    ] = None,
    tracking: TrackingOpt = None,
    out: Annotated[Path | None, typer.Option(help="Page to write (.html).")] = None,
    as_json: JsonOpt = False,
) -> None:
    """Compare models on the same items: differences, exact paired tests, certified curves."""
    if not places:
        raise CasemateError("compare", "", "needs runs, steps, models or certificates")
    chosen = names_in(names)
    found = api.compare(places, models=chosen, storage=storage, tracking=tracking, out=out)
    if not found.compared.comparisons:
        raise nothing_compared(found)
    if as_json:
        print(json.dumps(found.records(), indent=2))
        return
    _show(found)
    if out is not None:
        print(f"page: {out}")


def _show(found: api.Comparison) -> None:
    from components.report.comparison import holm_words

    for model in found.models:
        print(
            f"{model.label}: {model.model}, digest {model.digest[:12]}, {', '.join(model.places)}"
        )
    whole = [one for one in found.compared.comparisons if not one.is_part]
    print()
    _show_shares([s for s in found.compared.shares if not s.is_part])
    print(f"\ndifferences on the same items. {holm_words(whole)}")
    for one in whole:
        print(_line(one))
    parts = [one for one in found.compared.comparisons if one.is_part]
    if parts:
        ties = sum(one.is_tie for one in parts)
        print(f"{len(parts)} tests of variants: {ties} ties (--json and --out list them)")
    for refusal in found.compared.refusals:
        both = " and ".join(filter(None, (refusal.one, refusal.other)))
        print(f"not comparable: {', '.join(refusal.figures)}: {both}: {refusal.why}")


def _show_shares(shares: "Sequence[Share]") -> None:
    width = max((len(s.figure) for s in shares), default=0)
    names = max((len(s.model) for s in shares), default=0)
    for s in shares:
        doubt = f"  {s.doubt}" if s.doubt else ""
        line = share_line(s.value, s.low, s.high, num_items=s.num_items, kind=s.kind)
        print(f"{s.figure:<{width}}  {s.model:<{names}}  {line}{doubt}")


def _line(one: "Comparison") -> str:
    gap = points(one.value, one.low, one.high)
    counts = f"won {one.won}, lost {one.lost} of {one.num_items}"
    adjusted = f", Holm {one.adjusted:.3g}" if one.num_tests > 1 else ""
    tested = f"p {one.p_value:.3g}{adjusted} ({one.test})"
    better = one.outcome + ("" if one.is_tie else " is better")
    note = f"; {one.note}" if one.note else ""
    return f"{one.figure}: {one.one} - {one.other}: {gap}, {counts}, {tested}: {better}{note}"
