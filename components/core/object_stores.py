"""Access to object stores by URI (`s3://`, `gs://`, `az://`), and their errors in one line.

Credentials and endpoints come from the environment, as the tools of each cloud expect them. A
handle holds threads that do not survive a fork: each process opens its own.
"""

import os
import re
from datetime import timedelta
from functools import lru_cache
from typing import Any

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ONE_SLASH = re.compile(r"(s3|gs|az):/?(?!/)", re.IGNORECASE)
SCHEMES = ("s3://", "gs://", "az://")
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_NO_KEYS = (  # where the clouds' clients look for a role of the machine as a last resort
    "/latest/api/token",
    "/latest/meta-data",
    "token request",
    "169.254.169.254",
    "Account must be specified",
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


def open_bucket(bucket: str, *, quick: bool = False) -> Any:
    """The obstore handle of `s3://bucket`, one per process; `quick` gives up after seconds."""
    settings = tuple((name, os.environ.get(name)) for name in sorted(_settings()))
    return _opened(bucket, quick, os.getpid(), settings)


def _settings() -> set[str]:
    return {name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))}


@lru_cache(maxsize=8)
def _opened(bucket: str, quick: bool, pid: int, settings: tuple[Any, ...]) -> Any:
    from obstore.store import from_url

    plain = any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS)
    return from_url(
        bucket,
        client_options={
            "allow_http": plain or os.environ.get("AWS_ALLOW_HTTP") == "true",
            "timeout": "5s" if quick else "60s",
            "connect_timeout": "3s" if quick else "5s",
        },
        retry_config={
            "max_retries": 1 if quick else 5,
            "retry_timeout": timedelta(seconds=5 if quick else 60),
        },
    )


def reason_of(error: BaseException, uri: str) -> str:
    """The cause and the remedy in one line; obstore prints some 30 lines of debug text."""
    text, scheme = str(error), uri.partition("://")[0]
    keys = _KEYS.get(scheme, "the credentials")
    if any(sign in text for sign in _NO_KEYS):
        return f"no credentials found; set {keys}"
    for signs, meaning in (
        (("NoSuchBucket", "ContainerNotFound"), "the bucket does not exist; correct its name"),
        (("InvalidAccessKeyId",), "the access key is unknown; check AWS_ACCESS_KEY_ID"),
        (("SignatureDoesNotMatch",), "the secret key is wrong; check AWS_SECRET_ACCESS_KEY"),
        (("ExpiredToken", "TokenRefreshRequired"), "the credentials have expired; renew them"),
        (("AccessDenied", "403 Forbidden", "401 Unauthorized"), f"access is denied; check {keys}"),
        (("builder error",), "the endpoint is plain http; set AWS_ALLOW_HTTP=true"),
        (("Connection refused",), f"the endpoint refuses connections; check {_endpoint(scheme)}"),
        (("dns error",), f"the endpoint's name is unknown; check {_endpoint(scheme)}"),
        (
            ("timed out", "TimedOut"),
            f"no answer in time; check the network and {_endpoint(scheme)}",
        ),
        (("error sending request",), f"no connection; check the network and {_endpoint(scheme)}"),
        (("empty path segment", "EmptySegment"), "an object's name has an empty part; rename it"),
    ):
        if any(sign in text for sign in signs):
            return meaning
    lines = text.splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ")


def _endpoint(scheme: str) -> str:
    return {"s3": "AWS_ENDPOINT_URL", "az": "AZURE_STORAGE_ENDPOINT"}.get(scheme, "the proxy")
