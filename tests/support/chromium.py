"""Headless Chromium for tests of pages: Playwright's own, or the one that GRAPHRT_CHROMIUM names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of Playwright. Skips the test where the package is missing or no Chromium starts."""
    api = pytest.importorskip("playwright.sync_api", reason="the package `playwright` is not installed")
    with api.sync_playwright() as driver:
        try:
            found = driver.chromium.launch(
                executable_path=os.environ.get("GRAPHRT_CHROMIUM"), args=["--no-sandbox", "--disable-gpu"]
            )
        except api.Error as error:
            pytest.skip(f"no Chromium to start: {str(error).splitlines()[0]}")
        yield found
        found.close()
