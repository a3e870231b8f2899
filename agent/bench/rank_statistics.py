"""Whether two rows of measurements can be told apart: the area under the ROC curve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def auc(first: Sequence[float], second: Sequence[float]) -> float:
    """The probability that one of `second` is greater than one of `first`, ties counted half.

    0.5: nobody can tell by the number which row it is from; 0 or 1: everybody can (Mann and Whitney 1947).
    """
    both = np.concatenate([np.asarray(first, float), np.asarray(second, float)])
    order = np.argsort(both, kind="stable")
    _, inverse, counts = np.unique(both[order], return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = np.empty(len(both))
    ranks[order] = ((ends - counts + 1 + ends) / 2)[inverse]
    u = ranks[len(first) :].sum() - len(second) * (len(second) + 1) / 2
    return float(u / (len(first) * len(second)))
