"""Flags of `casemate recertify`: the fields of all claim settings."""

from typing import Annotated, Any, get_args, get_origin, get_type_hints

from components.certify import CLAIMS
from components.certify.settings import ClaimSettings
from components.core.errors import CasemateError
from pipelines.cli.options import Flag, flag, with_flags

FIELDS: dict[str, type[ClaimSettings]] = {name: c for c in CLAIMS for name in c.names()}
HINTS: dict[str, Any] = {
    name: hint for c in CLAIMS for name, hint in get_type_hints(c, include_extras=True).items()
}


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
        raise CasemateError(flag(name), text, "is not a comma-separated list of numbers") from error


def _base(hint: Any) -> Any:
    """The type of a hint without its ranges; `tuple` for all tuples."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return get_origin(hint) or hint


with_claim_flags = with_flags(
    {
        name: Flag(float if _base(HINTS[name]) is float else str, claim.help[name])
        for name, claim in FIELDS.items()
    }
)
