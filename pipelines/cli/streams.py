"""Output without credentials and control characters: all that a command prints passes here."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from components.core.control_characters import visible
from components.core.secrets import redact


class RedactedStream:
    """A text stream that shows `***` in place of credentials, and control characters escaped."""

    def __init__(self, stream: TextIO, shown: Callable[[str], str] | None = None) -> None:
        self._stream = stream
        self._shown = shown or (lambda text: visible(redact(text)))

    def write(self, text: str) -> int:
        return self._stream.write(self._shown(text))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    @property
    def rich_proxied_file(self) -> "RedactedStream":
        """Where rich draws progress bars: they move the cursor."""
        return RedactedStream(self._stream, redact)

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
