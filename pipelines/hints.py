"""Suggestions for misspelt words."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`is unknown; did you mean 'x'? allowed: ...`, continuing a sentence that names the word."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    guess = f"did you mean '{close[0]}'? " if close else ""
    return f"is unknown; {guess}allowed: {', '.join(names)}"
