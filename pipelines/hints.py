"""Suggestions for misspelt words."""

import difflib
from collections.abc import Iterable

MOST = 40  # names that one line lists


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`is unknown; did you mean 'x'? allowed: ...`, continuing a sentence that names the word."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    guess = f"did you mean '{close[0]}'? " if close else ""
    shown = ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if names[MOST:] else "")
    return f"is unknown; {guess}allowed: {shown}"
