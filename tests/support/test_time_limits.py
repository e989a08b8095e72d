"""Tests that hang end, and the suite says which they were: in Python code, and in native code that holds the GIL."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from support import ROOT

HANGING = """
import ctypes

def test_hangs_in_python():
    while True:
        pass

def test_is_reached():
    pass

def test_hangs_in_native_code():
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time it waits for itself, whatever signals come
        ctypes.PyDLL(None).pthread_mutex_lock(lock)

def test_is_not_reached():
    pass
"""


def _ended(folder: Path, *more: str) -> str:
    """What pytest says of these tests with this repository's settings, and a limit of one second."""
    file = folder / "test_hanging.py"
    file.write_text(HANGING)
    (folder / "conftest.py").symlink_to(ROOT / "tests" / "conftest.py")
    settings = ("-c", str(ROOT / "pyproject.toml"), "-o", "timeout=1", "-p", "no:cacheprovider")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-m", "pytest", *settings, *more, "-vv", f"--rootdir={folder}", str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode != 0
    return done.stdout + done.stderr


def test_hangs_end_with_the_names_of_their_tests(tmp_path: Path) -> None:
    said = _ended(tmp_path)
    assert "test_hangs_in_python FAILED" in said and "test_is_reached PASSED" in said
    assert "in test_hangs_in_native_code" in said and "test_is_not_reached PASSED" not in said


def test_a_process_that_hangs_is_replaced(tmp_path: Path) -> None:
    """As `make test` runs them, in processes of pytest-xdist: all other tests are run."""
    said = _ended(tmp_path, "-n", "1")
    assert "FAILED test_hanging.py::test_hangs_in_python" in said
    assert "crashed while running 'test_hanging.py::test_hangs_in_native_code'" in said
    assert "PASSED test_hanging.py::test_is_not_reached" in said


def test_there_is_a_limit() -> None:
    assert float(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["timeout"]) > 0
