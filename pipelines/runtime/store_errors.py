"""Errors of a storage in one line each: what is wrong, where, and what to do about it."""

import errno

from components.core.errors import CasemateError, first_line


class StoreError(CasemateError):
    """A storage cannot do what it was asked; `value` names the storage or one of its keys."""

    def __init__(self, value: object, remedy: str) -> None:
        super().__init__("storage", value, remedy)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.value, self.remedy)


class MissingError(StoreError):
    """A key that should be there is not."""


class DamagedError(StoreError):
    """A key holds other bytes than the ones that were stored under it."""


class UnavailableError(StoreError):
    """The storage does not answer; the same call may succeed later."""


def missing(where: object) -> MissingError:
    """The error for a key that must exist."""
    return MissingError(where, "is missing; redo its step with --force")


ACCESS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
ENDPOINT = "check AWS_ENDPOINT_URL"
# In this order: obstore asks the cloud's metadata address for credentials, which fails like an
# endpoint that is away.
CAUSES = (
    ("/latest/api/token", "has no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ("/latest/meta-data", "has no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ("metadata.google.internal", "has no credentials; set GOOGLE_APPLICATION_CREDENTIALS"),
    ("/metadata/identity", "has no credentials; set AZURE_STORAGE_ACCOUNT_KEY"),
    ("Account must be specified", "names no account; set AZURE_STORAGE_ACCOUNT_NAME"),
    ("Unable to recognise URL", "names no bucket; write s3://bucket/prefix"),
    ("URL did not match any known", "is not a URL of a bucket; write s3://bucket/prefix"),
    ("NoSuchBucket", "does not exist: create the bucket, or correct its name"),
    ("ExpiredToken", "refuses expired credentials; renew AWS_SESSION_TOKEN and its keys"),
    ("TokenRefreshRequired", "refuses expired credentials; renew AWS_SESSION_TOKEN and its keys"),
    ("RequestTimeTooSkewed", "refuses the time of this machine; set its clock"),
    ("InvalidAccessKeyId", f"does not know the access key; {ACCESS}"),
    ("SignatureDoesNotMatch", f"refuses the secret key; {ACCESS}"),
    ("AccessDenied", "denies access to these credentials; grant them reading and writing"),
    ("403 Forbidden", "denies access to these credentials; grant them reading and writing"),
    ("401 Unauthorized", f"refuses these credentials; {ACCESS}"),
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


def bucket_error(error: BaseException, where: str) -> StoreError:
    """An error of obstore, which has some 30 lines, in one."""
    text = str(error)
    for sign, remedy in CAUSES:
        if sign in text:
            return StoreError(where, remedy)
    for sign, remedy in PASSING:
        if sign in text:
            return UnavailableError(where, remedy)
    return StoreError(where, f"cannot be used ({first_line(error)[:200]})")


def folder_error(error: OSError, where: object) -> StoreError:
    """An error of the file system in one line."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "cannot be written: the disk is full; free some space, the same command continues"
        return StoreError(where, remedy)
    if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
        remedy = "is on a file system without hard links; use a local disk, NFS, or the bucket"
        return StoreError(where, f"{remedy} itself (s3://, gs://, az://)")
    cause = error.strerror or first_line(error)
    return StoreError(where, f"cannot be used ({cause}); choose another with --storage")
