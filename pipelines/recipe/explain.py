"""What is wrong in a recipe, in words of its keys: pydantic knows neither files nor hints."""

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from pydantic import BaseModel, ValidationError

from components.core.hints import did_you_mean

Mistake = tuple[str, str, str]  # key path, value, remedy

# Errors about several keys at once: their message names the keys itself.
RULES = (
    *("path", "fractions", "hopeless", "blocks", "main", "tune", "certify", "model"),
    *("scales", "curves", "threat", "train"),
)
KIND = "kind"  # of a section that there are several of


def explain(
    model: type[BaseModel], values: Mapping[str, Any], error: ValidationError
) -> list[Mistake]:
    """All mistakes that `model` found in plain values."""
    found = error.errors(include_url=False)
    # Where a default follows from other values, and one of those is wrong: the latter is told.
    found = [e for e in found if e["type"] != "default_factory_not_called"]
    return [_mistake(values, e["loc"], _with_kinds(model, values, e)) for e in found]


def _mistake(values: Any, loc: tuple[int | str, ...], error: Any) -> Mistake:
    """(key path, value, remedy) of one pydantic error, without pydantic's union tags."""
    path: list[str] = []
    for part in loc:
        if _holds(values, part):
            values = values[part]
        elif error["type"] != "missing" or part != loc[-1]:
            continue  # the tag of a union, not a key
        path.append(str(part))
    if error["type"] == "unknown_key":
        unknown = error["ctx"]["key"]  # as text; YAML also makes keys like `on` into True
        value = next(v for k, v in values.items() if str(k) == unknown)
        return ".".join([*path, unknown]), repr(value), error["msg"]
    if error["type"] == "missing":
        return ".".join(path), "", "is missing; write it"
    key = ".".join(path)
    if kinds := error.get("kinds"):
        if not isinstance(values, Mapping):
            kind = values if values in kinds else kinds[0]
            return key, repr(values), f"is no section; write e.g. {{{KIND}: {kind}}}"
        if KIND not in values:
            return f"{key}.{KIND}", "", f"is missing; choose one of {', '.join(kinds)}"
        return f"{key}.{KIND}", repr(values[KIND]), did_you_mean(str(values[KIND]), kinds)
    if error["type"] in RULES:
        if not key:  # of the whole recipe: the message begins with the key it is about
            key, _, remedy = error["msg"].partition(": ")
            return key, "", remedy
        return key, "", error["msg"]
    message = error["msg"][0].lower() + error["msg"][1:]
    return key, repr(values), message if message.startswith("is ") else f"is wrong: {message}"


def _with_kinds(model: type[BaseModel], values: Mapping[str, Any], error: Any) -> Any:
    """An error about a section's `kind` with all kinds that there are, as pydantic tells them."""
    if error["type"] == "union_tag_invalid":
        return error | {"kinds": re.findall(r"'([^']*)'", error["ctx"]["expected_tags"])}
    if error["type"] not in ("union_tag_not_found", "model_attributes_type"):
        return error
    probe: Any = deepcopy(dict(values))
    place, (*above, last) = probe, error["loc"]
    for part in above:
        place = place[part] if _holds(place, part) else place
    if not _holds(place, last):
        return error
    place[last] = {KIND: ""}  # of no kind: pydantic then says which ones it knows
    try:
        model.model_validate(probe)
    except ValidationError as told:
        for e in told.errors(include_url=False):
            if e["loc"] == error["loc"] and e["type"] == "union_tag_invalid":
                return _with_kinds(model, probe, e)
    return error


def _holds(values: Any, part: int | str) -> bool:
    if isinstance(values, list):
        return isinstance(part, int) and part < len(values)
    return isinstance(values, Mapping) and part in values
