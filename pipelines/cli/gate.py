"""`casemate gate`: minimum figures for a release."""

import json
from pathlib import Path
from typing import Annotated

import typer

from components.core.errors import CasemateError
from components.core.secrets import redact
from pipelines import api
from pipelines.api.gates import figure_records
from pipelines.cli.junit import Case, write_junit
from pipelines.cli.options import JsonOpt, PublicKeyOpt, SuspectOpt

commands = typer.Typer()


@commands.command(
    epilog="Example: casemate gate runs/demo --min certified.l2@0.5=0.6 --min robust.linf@8/255=0.4"
)
def gate(
    path: Annotated[
        str,
        typer.Argument(help="A storage, a flow or step in it, or a certificate; folder or URI."),
    ],
    minima: Annotated[
        list[str] | None,
        typer.Option("--min", metavar="NAME=SHARE", help="A minimum; without any: list names."),
    ] = None,
    lower_bound: Annotated[
        bool, typer.Option("--lower-bound", help="Compare the lower end of the 95 % interval.")
    ] = False,
    allow_suspect: SuspectOpt = False,
    key: PublicKeyOpt = None,
    junit: Annotated[Path | None, typer.Option(help="File for JUnit XML, as CI reads it.")] = None,
    as_json: JsonOpt = False,
) -> None:
    """Fail unless figures of finished results reach minimum values; results are verified first."""
    if not minima:
        if junit or key or lower_bound:
            raise CasemateError("--min", "", "is missing; without it figures are only listed")
        _list(path, as_json=as_json)
        return
    wanted = _read(minima)
    checks = {"lower_bound": lower_bound, "allow_suspect": allow_suspect}
    outcome = api.gate(path, wanted, key=key, **checks)
    if junit is not None:
        write_junit(junit, "casemate gate", [_case(check) for check in outcome.checks])
    if as_json:
        records = [check.record() for check in outcome.checks]
        print(json.dumps({"passed": outcome.passed, "minima": records}, indent=2))
    else:
        for check in outcome.checks:
            print(f"{'ok' if check.passed else 'FAILED'}: {_line(check)}")
    if not outcome.passed:
        raise typer.Exit(1)


def _read(minima: list[str]) -> dict[str, float | str]:
    """Shares by name."""
    found: dict[str, float | str] = {}
    for text in minima:
        name, equals, share = text.rpartition("=")
        if not (equals and name and share):
            remedy = "is not NAME=SHARE; write e.g. certified.l2@0.5=0.6"
            raise CasemateError("--min", text, remedy)
        if name in found:
            raise CasemateError("--min", text, "names the same figure twice")
        found[name] = share
    return found


def _list(path: str, *, as_json: bool) -> None:
    rows = figure_records(path)
    if as_json:
        names = ("name", "value", "low", "num_items", "doubt", "place")
        print(json.dumps([{name: row[name] for name in names} for row in rows], indent=2))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        doubt = f"  does not count: {row['doubt']}" if row["doubt"] else ""
        print(f"{row['name']:<{width}}  {row['words']}{doubt}")


def _line(check: api.Check) -> str:
    told = f"{check.words} {check.problem or f'>= {check.asked}'}".strip()
    return f"{check.name}: {told}: {check.place}"


def _case(check: api.Check) -> Case:
    name = f"{check.name} >= {check.asked}"
    line = redact(_line(check))
    return Case(f"casemate.{check.figure.result.step}", name, line if check.problem else "", line)
