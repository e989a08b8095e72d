"""MKL's functions are called on one number, hence by one thread, as soon as the CPU backend is imported."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import graphrt.backends.cpu
from graphrt.backends.cpu import vector_functions


def test_each_is_called_once_with_one_number_of_each_type(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, torch.dtype, int]] = []
    for name in vector_functions.NAMES:
        monkeypatch.setattr(torch, name, lambda x, name=name: called.append((name, x.dtype, x.numel())))
    importlib.reload(vector_functions)
    kinds = (torch.float32, torch.float64)
    assert called == [(name, kind, 1) for name in vector_functions.NAMES for kind in kinds]
    assert "exp" in vector_functions.NAMES


def test_it_is_the_first_that_the_backend_imports() -> None:
    lines = Path(graphrt.backends.cpu.__file__).read_text(encoding="utf-8").splitlines()
    assert "vector_functions" in next(line for line in lines if line.startswith(("from ", "import ")))
