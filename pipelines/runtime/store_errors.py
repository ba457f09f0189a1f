"""Errors of a storage in one line each: what is wrong, where, and what to do about it."""

import errno

from components.core.errors import CasemateError, first_line
from components.core.object_stores import remedy_of


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


def bucket_error(error: BaseException, where: str) -> StoreError:
    """An error of obstore, which has some 30 lines, in one."""
    remedy, passing = remedy_of(error)
    return UnavailableError(where, remedy) if passing else StoreError(where, remedy)


def folder_error(error: OSError, where: object) -> StoreError:
    """An error of the file system in one line."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "cannot be written: the disk is full; free some space, the same command continues"
        return StoreError(where, remedy)
    if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
        remedy = "is on a file system without hard links; use a local disk, NFS, or the bucket"
        return StoreError(where, f"{remedy} itself (s3://, gs://, az://)")
    cause = error.strerror or first_line(error)
    return StoreError(where, f"cannot be used ({cause}); choose another with --storage")
