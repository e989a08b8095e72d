"""How far a result is from its reference."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def nmse(actual: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """sum((actual - expected)^2) / sum(expected^2) in float64; the reference's energy is below.

    NaN or infinity where the reference has none (or another one) gives infinity; a reference of all zeros gives 0 when
    met exactly and infinity otherwise.
    """
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    special = ~np.isfinite(e)
    if not np.array_equal(a[special], e[special], equal_nan=True) or not np.isfinite(a[~special]).all():
        return float("inf")
    a, e = a[~special], e[~special]
    error, energy = float(np.sum((a - e) ** 2)), float(np.sum(e**2))
    if energy == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / energy
