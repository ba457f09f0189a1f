"""Shares of items as text: the one place where they are rounded, for terminal, pages and notes.

A proven share is rounded down, so that no text claims too much; a measured or attacked one is
rounded to nearest and has one more digit. Both ends of an interval are rounded outwards.
"""

import math
from typing import Literal

ShareKind = Literal["measured", "attacked", "proven"]


def percent(value: float, num_items: int, kind: ShareKind) -> str:
    """A share of `num_items` items in percent, without the sign: 59.7 proven, 59.78 measured.

    Division of the counts matters: 0.57 * 1000 is 569.99... in binary, and would print as 56.9.
    """
    if kind != "proven":
        return measured_percent(value)
    tenths = round(value * num_items) * 1000 // num_items
    return f"{tenths // 10}.{tenths % 10}"


def measured_percent(value: float) -> str:
    """Any measured share in percent, without the sign."""
    return f"{100 * value:.2f}"


def interval_ends(low: float, high: float) -> tuple[str, str]:
    """Both ends in percent, rounded outwards: the printed interval covers the exact one."""
    return f"{math.floor(1000 * low) / 10:.1f}", f"{math.ceil(1000 * high) / 10:.1f}"


def share_line(value: float, low: float, high: float, *, num_items: int, kind: ShareKind) -> str:
    """A share with its interval and its number of items, for terminals and notebooks."""
    first, last = interval_ends(low, high)
    return f"{percent(value, num_items, kind)} % 95% [{first}, {last}] n={num_items}"


def points(value: float, low: float, high: float) -> str:
    """A measured difference of two shares in percentage points, its interval rounded outwards."""
    first, last = math.floor(1000 * low) / 10, math.ceil(1000 * high) / 10
    return f"{100 * value:+.2f} points [{first:+.1f}, {last:+.1f}]"
