"""Problems of a recipe, collected and then raised together, one line each."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from components.core.errors import CasemateError
from components.core.settings import Problem, SettingError


class RecipeError(CasemateError):
    """A recipe with problems; the message has one line `source: key: value remedy` for each."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source, self.problems = source, list({str(p): p for p in problems}.values())
        first, *rest = self.problems
        lines = [str(self._error(p)) for p in rest]
        super().__init__(f"{source}: {first.field}", first.value, "\n".join([first.remedy, *lines]))

    def __str__(self) -> str:
        return "\n".join(str(self._error(problem)) for problem in self.problems)

    def _error(self, problem: Problem) -> CasemateError:
        return CasemateError(f"{self.source}: {problem.field}", problem.value, problem.remedy)

    def __reduce__(self) -> tuple[type, tuple[str, list[Problem]]]:
        return RecipeError, (self.source, self.problems)


@contextmanager
def named(source: str, sections: Collection[str]) -> Iterator[None]:
    """Errors of the block whose key is in one of the recipe's sections also name its file."""
    try:
        yield
    except CasemateError as error:
        if type(error) is not CasemateError or error.key.partition(".")[0] not in sections:
            raise
        raise CasemateError(f"{source}: {error.key}", error.value, error.remedy) from error


class Problems:
    """Problems in the order in which they were found."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, key: str, value: object, remedy: str) -> None:
        """Add a problem; `remedy` completes the sentence `key: value ...`."""
        self.found.append(Problem(key, value, remedy))

    @contextmanager
    def at(self, key: str) -> Iterator[None]:
        """Add errors that are raised inside the block, with `key` in front of the field."""
        try:
            yield
        except SettingError as error:
            self.found += [p._replace(field=_joined(key, p.field)) for p in error.problems]
        except CasemateError as error:
            self.add(_joined(key, error.key), error.value, _one_line(error.remedy))
        except ValueError as error:
            self.add(key, "", f"is wrong: {_one_line(str(error))}")

    def refuse(self, source: str) -> None:
        """Raise if there are any."""
        if self.found:
            raise RecipeError(source, self.found)


def _joined(key: str, field: str) -> str:
    return ".".join(filter(None, [key, field]))


def _one_line(text: str) -> str:
    return " ".join(text.split())
