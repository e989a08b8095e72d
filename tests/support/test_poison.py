"""The poison that conftest.py puts into unwritten memory."""

import numpy as np
import torch


def test_empty_arrays_are_nan() -> None:
    assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(2)).isnan().all()
    assert np.isnan(np.empty(3)).all() and np.isnan(np.empty_like(np.ones(2))).all()
