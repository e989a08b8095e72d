"""docs/models.md's table of architectures: made of the figures that are kept, which fit what there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from support import arch_table

from graphrt.models import load
from graphrt.models.arch import ARCHITECTURES

TABLE = json.loads(arch_table.FIGURES.read_text())
AGAIN = "run python tests/support/arch_table.py --write"


def test_the_page_has_the_table_of_the_figures() -> None:
    page = arch_table.PAGE.read_text()
    assert page.count(arch_table.BEGIN) == page.count(arch_table.END) == 1
    assert arch_table.with_table(page, TABLE) == page, AGAIN


def test_every_architecture_has_a_row_and_a_model() -> None:
    assert list(TABLE) == list(ARCHITECTURES), AGAIN
    assert {arch_table.architecture_of(name) for name in arch_table.NAMES} == set(ARCHITECTURES)


def test_the_features_are_those_of_the_models(tmp_path: Path) -> None:
    found: dict[str, list[str]] = {}
    for name in arch_table.NAMES:
        features = found.setdefault(arch_table.architecture_of(name), [])
        model = load(arch_table.write_model(tmp_path / f"{name}.gguf", name), "cpu")
        features += [f for f in arch_table.features(model) if f not in features]
    assert found == {arch: row["features"] for arch, row in TABLE.items()}, AGAIN


def test_the_figures_are_as_good_as_the_tests_ask() -> None:
    assert all(0 < row[backend] < 1e-6 for row in TABLE.values() for backend in ("cpu", "triton"))
