"""Prediction of the smoothed classifier without a radius (Cohen et al. 2019, sec. 3.2, PREDICT).

Symbols: n1 and n2 votes of the two leading classes, alpha failure probability.
"""

import numpy as np
from scipy import stats

from components.core.types import IntArray

ABSTAIN = -1


def predict_counts(counts: IntArray, *, alpha: float) -> int:
    """PREDICT of Cohen et al. 2019: the top class, or -1 when its lead may be chance.

    A returned class differs from the true top class with probability at most alpha (Hung & Fithian
    2019); the number of draws must be fixed in advance.
    """
    leader, p_value = lead_p_value(counts)
    return leader if p_value <= alpha else ABSTAIN


def lead_p_value(counts: IntArray) -> tuple[int, float]:
    """The top class of (C,) counts, ties to the lowest, and the p-value of its lead.

    Two-sided exact binomial test of n1 in n1 + n2 at 1/2.
    """
    if counts.ndim != 1 or len(counts) < 2 or counts.sum() < 1:
        raise ValueError("need the counts of at least two classes and at least one draw")
    first, second = np.argsort(-counts, kind="stable")[:2]  # stable: ties to the lowest class
    top, runner_up = int(counts[first]), int(counts[second])
    return int(first), float(stats.binomtest(top, top + runner_up, 0.5).pvalue)
