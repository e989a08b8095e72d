"""Plugins as they lie when they are installed: what pip would leave of them in a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from support import TESTS

PLUGIN = TESTS / "plugin"


def by_hand(target: Path) -> None:
    """What pip would leave, where there is no pip or no setuptools: the package and its metadata."""
    shutil.copytree(PLUGIN / "graphrt_tiny", target / "graphrt_tiny", dirs_exist_ok=True)
    write_metadata(target, "graphrt-tiny", "tiny = graphrt_tiny:TinyBackend")


def write_metadata(target: Path, name: str, *points: str) -> None:
    info = target / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[graphrt.backends]", *points]) + "\n")
