"""Credentials in a recipe: the password of `tracking.uri` is kept apart, any other is refused.

A recipe is stored with its results, shown in MLflow and sent with jobs, so none may stay in it.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from components.core.errors import CasemateError
from components.core.secrets import (
    HIDDEN,
    Credentials,
    has_secret_query,
    is_secret_key,
    remember,
    split_url,
)
from pipelines.recipe.schema.recipe import Recipe

TRACKING = "tracking.uri"
SERVER_ENV = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
_apart: dict[str, Credentials] = {}  # by the URI without them; in memory only


def without_credentials(values: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Plain values of a recipe without the password of `tracking.uri`; any other is an error."""
    tracking = values.get("tracking")
    if isinstance(tracking, Mapping) and isinstance(uri := tracking.get("uri"), str):
        bare = keep_apart(uri, key=f"{source}: {TRACKING}")
        if bare != uri:
            values = {**values, "tracking": {**tracking, "uri": bare}}
    for key, text in _texts(values):
        _refuse_secret(f"{source}: {key}", key, text)
    return dict(values)


def keep_apart(uri: str, *, key: str) -> str:
    """The URI without its password, which `credentials_of` returns."""
    bare, found = split_url(uri)
    if found is None:
        return uri
    if not bare.startswith(("http://", "https://")):  # the user of a database is not secret
        if found.password is None:
            return uri
        bare = bare.replace("://", f"://{quote(found.user, safe='')}@", 1)
    elif not found.password:
        remedy = f"names a user without a password; set {' and '.join(SERVER_ENV)} instead"
        raise CasemateError(key, uri, remedy)
    assert found.password is not None
    remember(found.password)
    _apart[bare] = found
    return bare


def credentials_of(uri: str | None) -> Credentials | None:
    """The user and password that a URI was written with, in this process."""
    return _apart.get(uri) if uri else None


def refuse_credentials_in_job(recipe: Recipe) -> None:
    """Refuse to submit a recipe whose password the job would not get: jobs show what they get."""
    if credentials_of(recipe.tracking.uri):
        remedy = (
            f"was written with a password, which jobs would show; leave it out and add {_flags()}"
        )
        raise CasemateError(TRACKING, recipe.tracking.uri, remedy)


def refuse_password_in_url(name: str, value: str) -> None:
    """Refuse to forward a variable whose URL carries a password beside its address."""
    found = split_url(value)[1] if "://" in value else None
    if found and found.password:
        raise CasemateError("--env", name, f"carries a password in its URL; add {_flags()} instead")


def _flags() -> str:
    return " ".join(f"--env {name}" for name in SERVER_ENV)


def _texts(values: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in nested values with its dotted key."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list | tuple):
        for i, value in enumerate(values):
            yield from _texts(value, f"{key}.{i}")
    elif isinstance(values, str):
        yield key, values


def _refuse_secret(where: str, key: str, text: str) -> None:
    remedy = "is a credential; recipes are stored and shown, so read it from the environment"
    if text and is_secret_key(key.rpartition(".")[2]):
        raise CasemateError(where, HIDDEN, remedy)
    if "://" not in text:
        return
    found = split_url(text)[1]
    is_web = text.startswith(("http://", "https://"))
    if has_secret_query(text) or (found and (is_web or found.password is not None)):
        raise CasemateError(where, text, remedy.replace("is a", "carries a"))
