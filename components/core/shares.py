"""Shares of items as they are shown: the one place of their interval and of their rounding.

Every share has the 95% interval of Wilson (1927): its coverage is 95 % on average and not at every
share. Files of attacks, searches and certificates hold the wider exact one (Clopper & Pearson), as
in their first version; `shown` replaces it. A proven share is rounded down, so that no text claims
too much; a measured or attacked one is rounded to nearest and has one more digit. Both ends of an
interval are rounded outwards.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

ShareKind = Literal["measured", "attacked", "proven"]
NORMAL_QUANTILE = 1.959963984540054  # of 97.5 %


def wilson_interval(k: float, n: float) -> tuple[float, float]:
    """95% interval of a share, k of n (Wilson 1927): the shares p with |k/n - p| <= z sd(p).

    Solves the quadratic, so the ends are exact where k is 0 or n. Neither must be whole.
    """
    if n < 1 or not 0 <= k <= n:
        raise ValueError(f"need 0 <= k <= n and n >= 1, got {k=}, {n=}")
    z2 = NORMAL_QUANTILE**2
    middle = (k + z2 / 2) / (n + z2)
    half = NORMAL_QUANTILE / (n + z2) * math.sqrt(k * (n - k) / n + z2 / 4)
    return (middle - half if k > 0 else 0.0), (middle + half if k < n else 1.0)


def share_of(k: int, n: int) -> dict[str, Any]:
    """k of n items as {"value", "low", "high", "num_items"}."""
    low, high = wilson_interval(k, n)
    return {"value": k / n, "low": low, "high": high, "num_items": n}


def shown(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The share of a stored document with the interval that all shares have."""
    value, num_items = float(stored["value"]), int(stored["num_items"])
    low, high = wilson_interval(round(value * num_items), num_items)
    return {"value": value, "low": low, "high": high, "num_items": num_items}


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
