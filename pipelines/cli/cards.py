"""`casemate card`: everything that is known about one model."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.core.errors import CasemateError
from pipelines import api
from pipelines.cli.options import JsonOpt, NamesOpt, StoragesOpt, TrackingOpt, names_in

if TYPE_CHECKING:
    from components.report.card.figures import Figure

commands = typer.Typer()


@commands.command(epilog="Example: casemate card runs/demo --model main --out card.html")
def card(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Model folder, training or flow (path or URI), models:/NAME@ALIAS, mlflow:RUN_ID.",
        ),
    ] = None,
    names: NamesOpt = None,
    storage: StoragesOpt = None,
    tracking: TrackingOpt = None,
    out: Annotated[
        Path | None, typer.Option(help="Page (.html), Markdown (.md), or a folder for both.")
    ] = None,
    publish: Annotated[
        bool, typer.Option("--publish", help="Describe the registered version in MLflow by it.")
    ] = False,
    as_json: JsonOpt = False,
) -> None:
    """Write the model card: all results that verify, with badges proven, attacked, measured."""
    if model is None:
        raise CasemateError("card", "", "needs a model folder, a training, a flow or models:/NAME")
    found = api.card(
        model,
        names=names_in(names),
        storage=storage,
        tracking=tracking,
        out=out,
        publish=publish,
    )
    if as_json:
        print(json.dumps([one.records() for one in found], indent=2))
        return
    for number, one in enumerate(found):
        if number:
            print()
        _show(one)


def _show(card: api.Card) -> None:
    content = card.content
    print(f"{content.subject.name}  digest {content.subject.digest[:12]}")
    width = max(len(figure.title) for figure in content.strip)
    for figure in content.strip:
        print(f"{figure.title:<{width}}  {_line(figure)}")
    print(f"{sum(c.holds for c in content.checks)} of {len(content.checks)} checks hold")
    for check in content.failed:
        print(f"FAILED: {check.text}")
    for verdict in content.verdicts:
        if verdict.reasons:
            print(f"{verdict.label}: {verdict.subject}: {'; '.join(verdict.reasons)}")
    for path in card.files:
        print(f"card: {path}")
    if card.published:
        print(f"description of {card.published}")


def _line(figure: "Figure") -> str:
    from components.report.card.figures import WITHOUT_NUMBER

    if figure.state in WITHOUT_NUMBER:
        return f"{figure.badge}{f': {figure.note}' if figure.note else ''}"
    spread = f" 95% [{figure.interval}] n={figure.num_items:,}" if figure.share else ""
    doubt = f" ({figure.state})" if figure.state in ("suspect", "unchecked") else ""
    return f"{figure.text:>6}{spread}  {figure.badge}{doubt}  {figure.detail}"
