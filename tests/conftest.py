"""Makes `pytest` work from a checkout, registers markers and quiets nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
for path in (ROOT, ROOT / "tests"):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

settings.register_profile("graphrt", deadline=None, derandomize=True)
settings.load_profile("graphrt")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU and the Triton backend")
