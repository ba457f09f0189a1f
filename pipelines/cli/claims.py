"""Flags of `casemate recertify`: the fields of all claim settings."""

from inspect import Parameter, signature
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from components.certify import CLAIMS
from components.certify.settings import ClaimSettings
from components.core.errors import CasemateError
from pipelines.cli.options import Command, with_parameters

FIELDS: dict[str, type[ClaimSettings]] = {name: c for c in CLAIMS for name in c.names()}
HINTS: dict[str, Any] = {
    name: hint for c in CLAIMS for name, hint in get_type_hints(c, include_extras=True).items()
}


def with_claim_flags(command: Command) -> Command:
    """`command`, which takes `**claim`, with one command-line flag for each field of a claim."""
    parameters = signature(command).parameters.values()
    *before, last = [p for p in parameters if p.kind is not Parameter.VAR_KEYWORD]
    flags = [_flag(name, claim) for name, claim in FIELDS.items()]
    return with_parameters(command, [*before, *flags, last])


def _flag(name: str, claim: type[ClaimSettings]) -> Parameter:
    kind = float if _base(HINTS[name]) is float else str
    hint = Annotated[kind | None, typer.Option(help=claim.help[name])]  # type: ignore[valid-type]
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=hint)


def read_claim(given: dict[str, Any]) -> dict[str, Any]:
    """The claim from the values of the flags; lists are comma-separated."""
    return {
        name: _numbers(name, value) if _base(HINTS[name]) is tuple else value
        for name, value in given.items()
    }


def _numbers(name: str, text: str | None) -> list[Any] | None:
    if text is None:
        return None
    hint = get_args(HINTS[name])[0]
    kind = _base(get_args(hint)[0])
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        key = f"--{name.replace('_', '-')}"
        raise CasemateError(key, text, "is not a comma-separated list of numbers") from error


def _base(hint: Any) -> Any:
    """The type of a hint without its ranges; `tuple` for all tuples."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return get_origin(hint) or hint
