"""Makes `pytest` work from a checkout, and hypothesis repeatable and without deadlines."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
for path in (ROOT, ROOT / "tests"):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

settings.register_profile("graphrt", deadline=None, derandomize=True)
settings.load_profile("graphrt")
