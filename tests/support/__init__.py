"""What tests share: small models and backends, references, emulators, kernels compiled ahead of time."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
DATA = TESTS / "data"
