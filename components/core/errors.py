"""The exception for mistakes that a user can fix, and one-line forms of other errors."""


class CasemateError(Exception):
    """Bad input: names the key, its value and the remedy, so that one line is enough to act on.

    `remedy` continues the sentence that key and value begin:
    `CasemateError("certify.sigma", 25, "is outside (0, 1]; write pixels as a fraction")`.
    """

    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(key, value, remedy)  # all three as args: survives pickling between workers
        self.key = key
        self.value = value
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.key}: " + " ".join(filter(None, [str(self.value), self.remedy]))


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(error: BaseException) -> str:
    """The last line of an error's message: the cause, if a traceback comes before it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
