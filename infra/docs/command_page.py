"""The reference of commands, from the command line itself."""

from typing import Any

import typer

from pipelines.cli.main import app

INTRODUCTION = """\
# Commands

`RECIPE` is a ready recipe's name or a YAML path. Every command has `--help`; most take `--json`.
Exit codes: 0 ok, 1 failed, 2 bad input: one line.
"""


def command_page() -> str:
    """A table of all commands, then one chapter each."""
    line: Any = typer.main.get_command(app)
    commands = {name: one for name, one in line.commands.items() if not one.hidden}
    rows = [f"| [`{name}`](#{name}) | {_first(one)} |" for name, one in commands.items()]
    table = "\n".join(["| command | what it does |", "|---|---|", *rows])
    chapters = [_chapter(name, one) for name, one in commands.items()]
    return "\n".join([INTRODUCTION, table, "", *chapters]).rstrip("\n") + "\n"


def _chapter(name: str, command: Any) -> str:
    """Usage, help, options."""
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["casemate", name, *command.collect_usage_pieces(context)])
    rows = [_row(parameter, context) for parameter in command.params if not parameter.hidden]
    table = ["| option | meaning |", "|---|---|", *rows] if rows else []
    text = [" ".join(part.split()) for part in (command.help or "").split("\n\n")]
    ends = [" ".join((command.epilog or "").split())]
    return "\n".join(
        [f"## {name}", "", f"`{usage}`", "", *text, "", *table, "", *map(_code, ends), ""]
    )


def _row(parameter: Any, context: Any) -> str:
    """One argument or option, as the command's help shows it."""
    names, meaning = parameter.get_help_record(context)
    return f"| `{_cell(names)}` | {_cell(meaning)} |"


def _first(command: Any) -> str:
    """The first sentence of a command's help."""
    return _cell(" ".join((command.help or "").split("\n\n")[0].split()))


def _code(epilog: str) -> str:
    """The example of a command's help as code."""
    words, _, example = epilog.partition(": ")
    return f"{words}: `{example}`" if example else epilog


def _cell(text: str) -> str:
    """Text on one line that does not end a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")
