"""A user-defined source, named `python:file.py:Name` (`components/core/user_code.py`).

`Name` is a class or function that returns a `Source`, called with `data.options` and, where
`data.path` is set, with `path`. Workers construct it again from the reference, so it must list the
same items each time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.core import user_code
from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.data.sources.base import Entry, Pixels, Source

NEEDED = ("classes", "entries", "decode")


@dataclass(frozen=True)
class UserSource:
    """The user's source, pickled as reference and options."""

    reference: str
    path: Path | None
    options: Mapping[str, Any]
    inner: Source = field(compare=False, repr=False)

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.inner.classes)

    @property
    def test_only(self) -> bool:
        return bool(getattr(self.inner, "test_only", False))

    @property
    def remarks(self) -> dict[str, str]:
        return {"code": self.reference, **getattr(self.inner, "remarks", {})}

    def entries(self) -> list[Entry]:
        return list(self.inner.entries())

    def decode(self, entry: Entry) -> Pixels:
        return self.inner.decode(entry)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.reference, self.path, dict(self.options))


def open_user(reference: str, path: Path | None, **options: Any) -> UserSource:
    """The referenced source, with checked options."""
    return _opened(reference, path, options)


def check_user_options(reference: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as arguments of the user's source; `path` is not one of them."""
    try:
        return user_code.checked_options(reference, options, field="source", also=("path",))
    except SettingError as error:
        first = error.problems[0]
        raise CasemateError(f"data.{first.field}", first.value, first.remedy) from error


def _opened(reference: str, path: Path | None, options: Mapping[str, Any]) -> UserSource:
    arguments = check_user_options(reference, options)
    place = {} if path is None else {"path": path}
    try:
        inner = user_code.load(reference, field="source")(**place, **arguments)
    except CasemateError:
        raise
    except Exception as error:
        remedy = f"fails to open: {type(error).__name__}: {' '.join(str(error).split())}"
        raise CasemateError("data.source", reference, remedy) from error
    if missing := [name for name in NEEDED if not hasattr(inner, name)]:
        remedy = f"is not a source: it lacks {', '.join(missing)}"
        raise CasemateError("data.source", reference, remedy)
    return UserSource(reference, path, options, inner)
