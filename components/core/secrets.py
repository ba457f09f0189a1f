"""Credentials in text: `redact` replaces them by `***`; every output passes through it.

Recognised are the user part of URLs, values of query keys such as `token` or `X-Amz-Signature`,
values of environment variables whose names say password, token, secret or key, and whatever was
handed to `remember`.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

HIDDEN = "***"
MIN_LENGTH = 6  # of the value of an environment variable: shorter ones are parts of ordinary words
ORDINARY = frozenset(
    {"default", "disabled", "enabled", "optional", "required", "secret", "password"}
)

_WORDS = r"password|passwd|passphrase|token|secret|signature|credential|api[_-]?key|access[_-]?key"
_USER = re.compile(r"(?<=://)[^\s/?#'\"`<>\\]+@")
_USER_IN_PATH = re.compile(r"(?<=:/)[^\s/:@'\"]+:[^\s/@'\"]+@")  # a Path has one slash only
_USER_WITHOUT_SCHEME = re.compile(  # not a pinned reference to user code
    r"(?<![\w/:.+-])(?!python:[^\s:@'\"]+@[0-9a-f]{16}:\w)[\w.+-]+:[^\s/:@'\"]+@(?=[\w.-]+)"
)
_QUERY = re.compile(
    rf"(?i)([?&;](?:[\w.%-]*(?:{_WORDS})[\w.%-]*|sig|key|pwd|auth|X-Amz-[\w-]+)=)[^&;\s#'\"<>]+"
)
_ASSIGNED = re.compile(rf"(?i)(\b(?:{_WORDS})=)[^\s,;&'\"]+")  # of a connection string
_HEADER = re.compile(r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic)\s+)[^\s'\"]+")
_NAMES = re.compile(
    r"(?i)PASSWORD|PASSWD|PASSPHRASE|TOKEN|SECRET|CREDENTIAL|(^|_)KEY$|_PWD$|APIKEY|ACCESS_KEY"
)
_NOT_NAMES = re.compile(r"(?i)_(FILE|PATH|DIR|URL|URI|MODE|NAME|ID|TYPE|TTL)$")
_KEYS = re.compile(rf"(?i)^(?:.*[_-])?(?:{_WORDS}|private[_-]?key|secret[_-]?key|pwd)$")
_known: set[str] = set()


class Credentials(NamedTuple):
    """The user part of a URL, decoded."""

    user: str
    password: str | None


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """The text with `***` in place of credentials."""
    for value in sorted(_secret_values(os.environ if environ is None else environ), key=_longest):
        text = text.replace(value, HIDDEN)
    if "@" in text:
        for pattern in (_USER, _USER_IN_PATH, _USER_WITHOUT_SCHEME):
            text = pattern.sub(f"{HIDDEN}@", text)
    if "=" in text:
        text = _ASSIGNED.sub(rf"\1{HIDDEN}", _QUERY.sub(rf"\1{HIDDEN}", text))
    return _HEADER.sub(rf"\1{HIDDEN}", text)


def _longest(value: str) -> int:
    return -len(value)


def redacted(value: Any) -> Any:
    """Nested values with redacted texts; the value of a key such as `password` goes whole."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        hidden = {k for k, v in value.items() if v and isinstance(v, str) and is_secret_key(k)}
        return {k: HIDDEN if k in hidden else redacted(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(entry) for entry in value]
    return value


def is_secret_key(key: object) -> bool:
    """Whether the value of a key with this name is a credential: `token`, `api_key`, ..."""
    return isinstance(key, str) and _KEYS.match(key) is not None


def remember(secret: str) -> None:
    """Redact this value from now on, wherever it appears; very short ones in URLs only."""
    if len(secret) >= 4:
        _known.update({secret, unquote(secret)})


def _secret_values(environ: Mapping[str, str]) -> Iterator[str]:
    yield from _known
    for name, value in environ.items():
        if len(value) < MIN_LENGTH or value.lower() in ORDINARY or value.isdecimal():
            continue
        if _NAMES.search(name) and not _NOT_NAMES.search(name) and not _is_file(value):
            yield value


def _is_file(value: str) -> bool:
    """Whether a variable names a file that holds the credential, not the credential."""
    return value.startswith("/") and len(value) < 4096 and Path(value).exists()


def split_url(url: str) -> tuple[str, Credentials | None]:
    """A URL without its user part, and that part."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url, None
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    name, colon, password = user.partition(":")
    bare = parts._replace(netloc=host).geturl()
    return bare, Credentials(unquote(name), unquote(password) if colon else None)


def has_secret_query(url: str) -> bool:
    """Whether a URL carries a credential behind its `?`."""
    return "://" in url and _QUERY.search(url) is not None
