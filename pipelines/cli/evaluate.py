"""The evaluate command: a recipe's models, or any model on any data."""

from typing import Annotated

import typer

from components.core.errors import CasemateError
from components.core.hints import did_you_mean
from pipelines.cli.given_model import Section, model_command
from pipelines.cli.options import NumItemsOpt, names_in

EXAMPLE = (
    "Example: casemate evaluate demo --set evaluate.corruptions.names=benchmark   Without a "
    "recipe: casemate evaluate --model models/deit-s --data imagenet --data-path imagenet "
    "--suite corruptions,spatial"
)
SUITES = ("clean", "corruptions", "shifts", "shape_bias", "transfer", "spatial")
NEEDS = {  # keys that have no default
    "shifts": "add --set evaluate.shifts.NAME.path=DIR, and its source if it is not prepared",
    "shape_bias": "add --set evaluate.shape_bias.path=DIR",
}


def _section(
    overrides: list[str],
    suite: Annotated[
        str | None,
        typer.Option(help=f"Of {', '.join(SUITES[1:])}, with commas; default: clean items only."),
    ] = None,
    num_items: NumItemsOpt = None,
) -> Section:
    """Empty suites; those that need a path must have it among the overrides."""
    names = names_in(suite)
    for name in names:
        if name not in SUITES:
            raise CasemateError("--suite", repr(name), did_you_mean(name, SUITES))
        written = any(key.startswith(f"evaluate.{name}.") for key in overrides)
        if name in NEEDS and not written:
            raise CasemateError("--suite", name, f"needs the place of its images; {NEEDS[name]}")
    suites: Section = {name: {} for name in names if name != "clean"}
    return {**suites, "subset": {"num_items": num_items}}


evaluate = model_command("evaluate", _section)
