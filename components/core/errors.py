"""The exception for mistakes that a user can fix, and one-line forms of other errors."""

from collections.abc import Iterator
from contextlib import contextmanager

from components.core.control_characters import one_line
from components.core.secrets import redact


class CasemateError(Exception):
    """Bad input: names the key, its value and the remedy, so that one line is enough to act on.

    `remedy` continues the sentence that key and value begin:
    `CasemateError("certify.sigma", 25, "is outside (0, 1]; write pixels as a fraction")`.
    Credentials in it are replaced by `***`.
    """

    def __init__(self, key: str, value: object, remedy: str) -> None:
        shown = redact(str(value))
        value, remedy = value if shown == str(value) else shown, redact(remedy)
        super().__init__(key, value, remedy)  # all three as args: survives pickling between workers
        self.key = key
        self.value = value
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.key}: " + " ".join(filter(None, [str(self.value), self.remedy]))
        return one_line(redact(text))


@contextmanager
def at_key(key: str, *, then: str = "") -> Iterator[None]:
    """Errors of the block name this key instead of their own; `then` continues the remedy."""
    try:
        yield
    except CasemateError as error:
        raise CasemateError(key, error.value, error.remedy + then) from error


@contextmanager
def below_key(key: str, *, instead_of: str) -> Iterator[None]:
    """Errors of the block that name a key below `instead_of` name it below `key`."""
    try:
        yield
    except CasemateError as error:
        inner = error.key.removeprefix(f"{instead_of}.")
        if inner == error.key:
            raise
        raise CasemateError(f"{key}.{inner}", error.value, error.remedy) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if there is no message."""
    return redact((str(error).strip().splitlines() or [type(error).__name__])[0])


def last_line(error: BaseException) -> str:
    """The last line of an error's message: the cause, if a traceback comes before it."""
    return redact((str(error).strip().splitlines() or [type(error).__name__])[-1])
