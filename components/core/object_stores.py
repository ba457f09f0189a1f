"""Access to object stores by URI (`s3://`, `gs://`, `az://`), and their errors in one line.

Credentials and endpoints come from the environment, as the tools of each cloud expect them. A
handle holds threads that do not survive a fork: each process opens its own.
"""

import os
import re
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from components.core.errors import CasemateError, first_line

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ONE_SLASH = re.compile(r"(s3|gs|az):/?(?!/)", re.IGNORECASE)
SCHEMES = ("s3://", "gs://", "az://")
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
ACCESS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
ENDPOINT = "check AWS_ENDPOINT_URL"
# In this order: obstore asks the cloud's metadata address for credentials, which fails like an
# endpoint that is away.
CAUSES = (
    ("/latest/api/token", "has no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ("/latest/meta-data", "has no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ("metadata.google.internal", "has no credentials; set GOOGLE_APPLICATION_CREDENTIALS"),
    ("/computeMetadata", "has no credentials; set GOOGLE_APPLICATION_CREDENTIALS"),
    ("/metadata/identity", "has no credentials; set AZURE_STORAGE_ACCOUNT_KEY"),
    ("169.254.169.254", "has no credentials; set those of the cloud in the environment"),
    ("Account must be specified", "names no account; set AZURE_STORAGE_ACCOUNT_NAME"),
    ("Unable to recognise URL", "names no bucket; write s3://bucket/prefix"),
    ("URL did not match any known", "is not a URL of a bucket; write s3://bucket/prefix"),
    ("NoSuchBucket", "does not exist: create the bucket, or correct its name"),
    ("ExpiredToken", "refuses expired credentials; renew AWS_SESSION_TOKEN and its keys"),
    ("TokenRefreshRequired", "refuses expired credentials; renew AWS_SESSION_TOKEN and its keys"),
    ("RequestTimeTooSkewed", "refuses the time of this machine; set its clock"),
    ("InvalidAccessKeyId", f"does not know the access key; {ACCESS}"),
    ("SignatureDoesNotMatch", f"refuses the secret key; {ACCESS}"),
    ("AccessDenied", "denies access to these credentials; check their rights"),
    ("403 Forbidden", "denies access to these credentials; check their rights"),
    ("401 Unauthorized", f"refuses these credentials; {ACCESS}"),
    ("<!DOCTYPE", f"does not answer like a store of objects; {ENDPOINT}"),
    ("<html", f"does not answer like a store of objects; {ENDPOINT}"),
    ("EmptySegment", "holds a name with an empty part between slashes; rename it"),
    ("builder error", "has an endpoint of plain http; set AWS_ALLOW_HTTP=true"),
)
PASSING = (
    ("Connection refused", f"refuses connections; {ENDPOINT}"),
    ("dns error", f"has an endpoint of unknown name; {ENDPOINT}"),
    ("timed out", f"does not answer in time; {ENDPOINT}"),
    ("SlowDown", "asks for fewer requests; use fewer workers, or continue later"),
    ("503 Service Unavailable", "is unavailable (503); the same command continues later"),
    ("429 Too Many Requests", "asks for fewer requests; use fewer workers, or continue later"),
    ("500 Internal Server Error", "has an internal error (500); the same command continues later"),
    ("502 Bad Gateway", "is unavailable (502); the same command continues later"),
    ("504 Gateway Timeout", "is unavailable (504); the same command continues later"),
    ("request or response body error", "cuts its answers short; the same command continues later"),
    ("error decoding response body", "cuts its answers short; the same command continues later"),
    ("error sending request", f"cannot be reached; {ENDPOINT}"),
    ("connection closed", f"closes connections; {ENDPOINT}"),
)


def is_uri(text: str) -> bool:
    """Whether a path is a URI, of any scheme; a Windows or relative path is not."""
    return _URI.match(text) is not None


def uri_problem(text: str) -> str | None:
    """What is wrong with the form of a URI, as a remedy; None for a good one and for a path."""
    if not is_uri(text):
        mangled = _ONE_SLASH.match(text)
        return f"has too few slashes; write {mangled[1]}://bucket/prefix" if mangled else None
    scheme, _, rest = text.partition("://")
    if f"{scheme}://" not in SCHEMES:
        return f"has a scheme that cannot be read; choose {', '.join(SCHEMES)} or a path"
    bucket, *parts = rest.rstrip("/").split("/")
    if not bucket or "@" in bucket:
        return (
            f"names no bucket; write {scheme}://bucket/prefix, with credentials in {_KEYS[scheme]}"
        )
    if any(part in ("", ".", "..") for part in parts):
        return "has an empty part, `.` or `..` between slashes; remove it"
    return None


def check_endpoints() -> None:
    """Refuse an address of a server that is not a URL: obstore would end the process.

    An empty variable counts as one that is not set.
    """
    for name in ENDPOINTS:
        value = os.environ.get(name)
        if value == "":
            del os.environ[name]
        elif value is not None and not _is_http(value):
            remedy = "is not the URL of a server; write http://host:port or https://host"
            raise CasemateError(name, value, remedy)


def _is_http(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number that a port can have
        return False


class Patience(NamedTuple):
    """How long a request may take, and how often it is repeated."""

    retries: int
    seconds: int


QUICK = Patience(retries=1, seconds=5)  # for a look that may fail: lint
FIRST = Patience(retries=4, seconds=60)  # an address that does not answer is probably wrong
LONG = Patience(retries=10, seconds=60)  # a store that is busy for a minute


def open_bucket(bucket: str, patience: Patience) -> Any:
    """The obstore handle of `s3://bucket`; one per process and environment."""
    check_endpoints()
    names = sorted(name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_")))
    return _opened(bucket, patience, os.getpid(), tuple(os.environ[name] for name in names))


@lru_cache(maxsize=16)
def _opened(bucket: str, patience: Patience, pid: int, environment: tuple[str, ...]) -> Any:
    from obstore.store import from_url

    plain = any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS)
    client: Any = {
        "allow_http": plain or os.environ.get("AWS_ALLOW_HTTP") == "true",
        "timeout": f"{patience.seconds}s",
        "connect_timeout": f"{min(5, patience.seconds)}s",
    }
    wait: Any = {
        "max_retries": patience.retries,
        "retry_timeout": timedelta(seconds=3 * patience.seconds),
    }
    return from_url(bucket, client_options=client, retry_config=wait)


def remedy_of(error: BaseException) -> tuple[str, bool]:
    """The cause and remedy in one line, of obstore's 30; and whether the cause may pass."""
    text = str(error)
    for sign, remedy in CAUSES:
        if sign in text:
            return remedy, False
    for sign, remedy in PASSING:
        if sign in text:
            return remedy, True
    return f"cannot be used ({first_line(error)[:200]})", False
