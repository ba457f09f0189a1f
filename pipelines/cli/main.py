"""`casemate`: parsing and printing only; heavy imports live inside the commands."""

import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from components.core.errors import CasemateError, first_line
from components.core.hints import nearest_of
from components.core.object_stores import is_uri
from components.core.shares import percent
from pipelines import api
from pipelines.cli import analyze as cli_analyze
from pipelines.cli import attack as cli_attack
from pipelines.cli import cards as cli_cards
from pipelines.cli import certify as cli_certify
from pipelines.cli import comparing as cli_comparing
from pipelines.cli import data as cli_data
from pipelines.cli import doctor as cli_doctor
from pipelines.cli import estimate as cli_estimate
from pipelines.cli import evaluate as cli_evaluate
from pipelines.cli import flow as cli_flow
from pipelines.cli import gate as cli_gate
from pipelines.cli import importing as cli_import
from pipelines.cli import jobs as cli_jobs
from pipelines.cli import leaderboard as cli_leaderboard
from pipelines.cli import manifest as cli_manifest
from pipelines.cli import models as cli_models
from pipelines.cli import scaling as cli_scaling
from pipelines.cli import signing as cli_signing
from pipelines.cli import starting as cli_starting
from pipelines.cli import storages as cli_storages
from pipelines.cli.claims import read_claim, with_claim_flags
from pipelines.cli.options import (
    CertificateArg,
    Flag,
    JsonOpt,
    PublicKeyOpt,
    SetOpt,
    SmokeOpt,
    flag,
    with_flags,
)
from pipelines.cli.published import OF_TABLE, show_table
from pipelines.cli.streams import redacted_output

if TYPE_CHECKING:
    from components.certify.verify import VerifyReport

SHOWN_PROBLEMS = 20  # problems that verify prints
PATHS = """\
My model         casemate attack --model MODEL --data DIR|SOURCE --eps 8/255
                 casemate init --data DIR         a first recipe for your images
                 casemate import-weights --help   other people's weights
                 casemate verify CERTIFICATE      check a certificate, no GPU needed
My cluster       casemate run demo                the whole chain, in minutes, on this machine
                 casemate doctor --address A      is the cluster ready?
                 casemate submit my-recipe.yaml --address URL --storage s3://bucket/runs
A paper's table  casemate recipes --table         every table and figure, with its recipes
                 casemate estimate RECIPE         hours, memory and money before it starts
                 casemate run RECIPE --smoke      its whole chain, shrunk to seconds

casemate --help lists all commands.
"""


class Commands(TyperGroup):
    """The commands; one line for a name that is none of them."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        name = args[0]
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            remedy = nearest_of(name, self.list_commands(ctx), listing="casemate --help", most=1)
            raise CasemateError("command", name, remedy)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 ok, 1 failed, 2 bad input. --verbose anywhere shows tracebacks.",
)


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Train, tune, attack, evaluate, analyze and certify vision transformers; Ray and MLflow."""
    if version:
        from importlib.metadata import version as version_of

        print(f"casemate {version_of('casemate')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(PATHS, end="")


cli_flow.add_commands(
    app,
    {
        "attack": (cli_attack.attack, cli_attack.EXAMPLE),
        "evaluate": (cli_evaluate.evaluate, cli_evaluate.EXAMPLE),
        "analyze": (cli_analyze.analyze, cli_analyze.EXAMPLE),
        "certify": (cli_certify.certify, cli_certify.EXAMPLE),
    },
)


@app.command(epilog="Example: casemate recipes demo --set seed=1")
@with_flags(OF_TABLE)
def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Recipe to print, resolved; with --table a paper's folder.")
    ] = None,
    set_: SetOpt = None,
    smoke: SmokeOpt = False,
    table: Annotated[
        bool,
        typer.Option(
            "--table", help="All tables and figures of the papers: recipes, cost, status."
        ),
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of recipes, for editors.")
    ] = False,
    as_json: JsonOpt = False,
    **of_table: Any,
) -> None:
    """List the ready recipes, or print one with every default written out."""
    from pipelines.recipe import load as recipe

    if table:
        _refuse_beside_table({"--set": set_, "--smoke": smoke, "--schema": schema})
        show_table(name, as_json=as_json, **of_table)
        return
    _refuse_without_table(of_table)
    if schema:
        from pipelines.recipe.schema.for_editors import json_schema

        print(json.dumps(json_schema(), indent=2))
        return
    if name:
        loaded = api.load_recipe(name, overrides=set_ or [], smoke=smoke)
        print(json.dumps(loaded.resolved(), indent=2) if as_json else loaded.to_yaml(), end="")
        return
    rows = {n: recipe.headline(n) for n in recipe.available()}
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        width = max(map(len, rows))
        for key, text in rows.items():
            print(f"{key:<{width}} {text}")


def _refuse_beside_table(options: Mapping[str, object]) -> None:
    for option, value in options.items():
        if value:
            raise CasemateError(option, "", "does not apply to --table")


def _refuse_without_table(options: Mapping[str, object]) -> None:
    for key, value in options.items():
        if value:
            shown = "" if value is True else value
            raise CasemateError(flag(key), shown, "applies to --table only")


@app.command(epilog="Example: casemate lint my-recipe.yaml")
def lint(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE...", help="Names of ready recipes or YAML paths."),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Lint all ready recipes.")] = False,
    set_: SetOpt = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="A", help="Cluster whose GPUs are counted: its head or dashboard."),
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """Validate recipes and warn about known mistakes."""
    from pipelines.recipe.load import available

    lint_one = partial(api.lint, overrides=set_ or [], address=address)
    names = available() if all_ else recipes or []
    if not names:
        raise CasemateError("lint", "", "needs a recipe's name or path, or --all")
    if len(names) == 1:  # an error ends the command
        _show_lint(names[0], lint_one(names[0]), as_json=as_json)
        return
    wrong, found = 0, {}
    for name in names:
        try:
            found[name] = lint_one(name)
        except CasemateError as error:
            print(f"casemate: {error}", file=sys.stderr)
            wrong += 1
            continue
        if not as_json:
            _show_lint(name, found[name], as_json=False)
    if as_json:
        print(json.dumps({n: [_plain(w) for w in ws] for n, ws in found.items()}, indent=2))
    if wrong:
        raise typer.Exit(2)


def _show_lint(name: str, found: Sequence[Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([_plain(warning) for warning in found], indent=2))
        return
    for warning in found:
        print(f"warning: {warning.key}: {warning.message}")
    print(f"{name}: valid, {len(found)} warning(s)")


def _plain(warning: Any) -> dict[str, str]:
    return {"key": warning.key, "message": warning.message}


SOURCES = {
    "model": Flag(str, "Model folder; default: the one the step used."),
    "data": Flag(str, "Prepared dataset; default: the one the step used."),
    "denoiser": Flag(str, "Denoiser folder; default: the one the step used."),
}


@app.command(epilog="Example: casemate verify runs/demo/certify.l2-1f2e3d4c5b6a --resample 5")
@with_flags(SOURCES)
def verify(
    path: Annotated[
        str, typer.Argument(help="Certificate folder (or its URI), or one of its files.")
    ],
    resample: Annotated[
        int, typer.Option(help="Re-run K random items; votes must match exactly.")
    ] = 0,
    key: PublicKeyOpt = None,
    signature: Annotated[
        Path | None, typer.Option(help="Its signature; default: beside the certificate.")
    ] = None,
    as_json: JsonOpt = False,
    **sources: str | None,
) -> None:
    """Recompute every claim of a certificate from its votes; no GPU needed."""
    report = api.verify(path, resample=resample, key=key, signature=signature, **sources)
    if as_json:
        found = {
            "num_items": report.num_items,
            "sound": report.sound,
            "resampled": resample,
            "problems": report.problems,
        }
        signed = {"signed_by": report.signed_by or None} if key else {}
        print(json.dumps({**found, **signed}, indent=2))
    else:
        _show_verified(path, report, resample=resample)
    if report.problems:
        raise typer.Exit(1)


def _show_verified(path: str, report: "VerifyReport", *, resample: int) -> None:
    problems = report.problems
    for problem in problems[:SHOWN_PROBLEMS]:
        print(f"problem: {problem}")
    if problems and not report.num_items:
        return  # files that were not signed are not checked
    if len(problems) > SHOWN_PROBLEMS:
        print(f"and {len(problems) - SHOWN_PROBLEMS} more (--json lists them all); if only last")
        print("digits differ, an earlier version derived them: recertify derives them again")
    verdict = "every claim holds" if not problems else f"{len(problems)} problem(s)"
    again = f", votes of {resample} items repeated" if resample else ""
    print(f"{path}: {report.num_items} items checked{again}: {verdict}")
    if report.signed_by and not problems:
        print(f"signed by key {report.signed_by}")
    if not report.sound:
        print("not sound: these claims follow a published rule that is not a valid bound")
    if not resample and not _has_manifest(path):
        print("no manifest.json here: only --resample detects items that were left out")


def _has_manifest(path: str) -> bool:
    """Whether the certificate is that of a step; a stored one always is."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return is_uri(path) or (folder / "manifest.json").exists()


@app.command(
    epilog="Example: casemate recertify runs/demo/certify.l2-1f2e3d4c5b6a --failure-prob 0.01"
)
@with_claim_flags
def recertify(
    path: CertificateArg,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the new certificate; default: PATH-recertified.")
    ] = None,
    as_json: JsonOpt = False,
    **claim: Any,
) -> None:
    """Derive another certificate from the same votes: other sizes, radii, rule or alpha."""
    from components.certify.registry import family_of

    made = api.recertify(path, out, **read_claim(claim))
    document = made.document
    if as_json:
        print(
            json.dumps(
                {
                    "folder": str(made.folder),
                    "claim": document.claim,
                    "summary": document.summary,
                },
                indent=2,
            )
        )
        return
    family = family_of(document.kind)
    for entry in document.summary["certified"]:
        at = family.budget(entry)
        shares = family.shares(entry)
        others = [f"   rule {rule} {_percent(share)}" for rule, share in shares.items() if rule]
        print(f"certified at {at:<8} {_percent(shares[''])}{''.join(others)}")
    if not document.sound:
        print(f"sound: false ({family.unsound_words})")
    print(f"certificate: {made.folder}")


def _percent(share: Mapping[str, Any]) -> str:
    return f"{percent(share['value'], share['num_items'], 'proven'):>5} %"


for group in (
    *(
        cli_signing,
        cli_comparing,
        cli_leaderboard,
        cli_cards,
        cli_gate,
        cli_certify,
        cli_estimate,
        cli_doctor,
    ),
    *(
        cli_jobs,
        cli_manifest,
        cli_starting,
        cli_data,
        cli_models,
        cli_import,
        cli_scaling,
        cli_storages,
    ),
):
    app.add_typer(group.commands)


def main() -> None:
    """Entry point: one line on stderr and exit code 2 for bad input, 1 for a failure."""
    verbose = "--verbose" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--verbose"]
    with redacted_output():
        try:
            code = app(prog_name="casemate", standalone_mode=False)
            sys.exit(code if isinstance(code, int) else 0)
        except CasemateError as error:
            _show_error(f"casemate: {error}", verbose=verbose)
            sys.exit(2)
        except typer.TyperException as error:  # options and arguments
            print(f"casemate: {_usage_words(error)}", file=sys.stderr)
            sys.exit(error.exit_code)
        except typer.Abort:  # at a prompt
            sys.exit(1)
        except Exception as error:
            line = f"casemate: failed: {first_line(error)} (--verbose shows where)"
            _show_error(line, verbose=verbose)
            sys.exit(1)


def _usage_words(error: typer.TyperException) -> str:
    """What is wrong with the words of a command line, in one line."""
    context = getattr(error, "ctx", None)
    place = context.command_path if context else "casemate"
    said = " ".join(error.format_message().split()).rstrip(".")
    return f"{said[:1].lower()}{said[1:]}; {place} --help shows what it takes"


def _show_error(line: str, *, verbose: bool) -> None:
    print(traceback.format_exc() if verbose else line, file=sys.stderr)
