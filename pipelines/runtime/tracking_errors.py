"""MLflow's errors sorted: the server is away, the user can mend it, or neither."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import requests
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import OperationalError

from components.core.errors import CasemateError, first_line
from pipelines.recipe.credentials import SERVER_ENV, TRACKING
from pipelines.runtime.outbox import UnavailableError
from pipelines.runtime.tracking_uri import is_server

PASSING = frozenset({"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED"})
PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504})
NO_ACCESS = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED"})
EXISTS, MISSING = "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST"
LOST = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)


@contextmanager
def sorted_errors(uri: str) -> Iterator[None]:
    """Raise `UnavailableError` for what may pass, `CasemateError` for what a user can mend."""
    try:
        yield
    except (MlflowException, requests.RequestException, OperationalError, OSError) as error:
        raise _sorted(error, uri) from error


def _sorted(error: Exception, uri: str) -> Exception:
    text = str(error)
    if "database or disk is full" in text or getattr(error, "errno", None) == errno.ENOSPC:
        remedy = "cannot be written: the disk is full; free some space, the same command continues"
        return CasemateError(TRACKING, uri, remedy)
    if _has_no_access(error):
        remedy = f"refuses access ({first_line(error)}); set {' and '.join(SERVER_ENV)}"
        return CasemateError(TRACKING, uri, remedy)
    if _passes(error, uri):
        return UnavailableError(cause_of(error))
    if uri.startswith("sqlite:") and "OperationalError" in text:
        return CasemateError(TRACKING, uri, f"cannot be used: {cause_of(error)}")
    return error


def _has_no_access(error: Exception) -> bool:
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return error.response.status_code in (401, 403)
    return isinstance(error, MlflowException) and error.error_code in NO_ACCESS


def _passes(error: Exception, uri: str) -> bool:
    """Whether the same call may succeed later."""
    if is_conflict(error):
        return True
    if uri.startswith("sqlite:"):
        return "database is locked" in str(error)
    if isinstance(error, LOST):
        return True
    if isinstance(error, requests.HTTPError):
        return error.response is not None and error.response.status_code in PASSING_STATUS
    if isinstance(error, MlflowException):
        return error.error_code in PASSING
    return isinstance(error, OperationalError) and not is_server(uri)


def is_conflict(error: Exception) -> bool:
    """Whether another flow wrote the same row at the same time; the next try finds it."""
    text = str(error)
    return any(known in text for known in ("UniqueViolation", "duplicate key", "UNIQUE constraint"))


def cause_of(error: Exception) -> str:
    """The innermost reason in a few words, as far as the libraries let it be found."""
    text = " ".join(str(error).split())
    for known in ("Connection refused", "Name or service not known", "timed out", "reset by peer"):
        if known.lower() in text.lower():
            return known
    if "OperationalError)" in text:  # SQLAlchemy: "(driver.OperationalError) reason [SQL: ..."
        return first_line(Exception(text.partition("OperationalError)")[2].split("[SQL")[0]))
    return first_line(Exception(text[:300]))
