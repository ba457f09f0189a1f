"""Output without credentials: all that a command prints passes through `redact`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from components.core.secrets import redact


class RedactedStream:
    """A text stream that shows `***` in place of credentials."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(redact(text))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def redacted_output() -> Iterator[None]:
    """Both streams of this process for the time of a command."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = RedactedStream(out), RedactedStream(err)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
