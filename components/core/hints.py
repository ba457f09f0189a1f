"""Suggestions for misspelt words."""

import difflib
from collections.abc import Iterable

MOST = 40  # names listed in one line
NEAREST = 3  # similar names suggested from a long list


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`is unknown; did you mean 'x'? allowed: ...`, to be written after the word."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    guess = f"did you mean '{close[0]}'? " if close else ""
    shown = ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if names[MOST:] else "")
    return f"is unknown; {guess}allowed: {shown}"


def nearest_of(word: str, known: Iterable[str], *, listing: str, most: int = NEAREST) -> str:
    """Like `did_you_mean` for a long list: similar names and the command that lists all."""
    names = sorted(known)
    like = difflib.get_close_matches(word, names, n=most, cutoff=0.5)
    like += [name for name in names if word in name and name not in like]
    guess = f"did you mean {' or '.join(repr(name) for name in like[:most])}? " if like else ""
    return f"is unknown; {guess}`{listing}` lists all"
