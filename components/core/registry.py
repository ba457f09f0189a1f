"""Registries of attacks, objectives and so on: name -> settings class and implementation."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple, TypeVar, get_args

from components.core.settings import hints_of

KIND = "kind"
S = TypeVar("S")


class Entry(NamedTuple):
    """One kind; `implementation` is `module:attribute`, imported when it is first needed."""

    name: str
    settings: type
    implementation: str

    def load(self) -> Any:
        """The class or function behind the name."""
        return load_reference(self.implementation)


def load_reference(reference: str) -> Any:
    """The class or function that `module:attribute` names."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


class Registry:
    """All entries of one sort, in order; names are the literals of `kind` in the settings class."""

    def __init__(self, what: str) -> None:
        self.what = what  # singular, e.g. "attack"
        self._entries: dict[str, Entry] = {}

    def add(self, settings: type, implementation: str) -> None:
        """Register a settings class and its implementation, `module:attribute`."""
        for name in get_args(hints_of(settings)[KIND]):
            if name in self._entries:
                raise ValueError(f"{self.what} {name} is registered twice")
            self._entries[name] = Entry(name, settings, implementation)

    def register(self, implementation: str) -> Callable[[type[S]], type[S]]:
        """Decorator of a settings class: `add` it with this implementation."""

        def added(settings: type[S]) -> type[S]:
            self.add(settings, implementation)
            return settings

        return added

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def classes(self) -> tuple[type, ...]:
        """The settings classes, each once, in the order they were added."""
        return tuple(dict.fromkeys(entry.settings for entry in self._entries.values()))
