"""Kept machine code runs only where no other user can have written it; everything else is compiled, with a sentence."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from graphrt import private_files
from graphrt.backends.cpu.fast import jit, rows

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")


class Cache:
    """A folder of kernels; load() loads one and tells whether it was compiled."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.compiled = folder, 0
        self.kernel = rows.dequant_kernel("f32", "f32", "i32")
        real = jit.compile_ir

        def compile_ir(text: str) -> bytes:
            self.compiled += 1
            return real(text)

        monkeypatch.setattr(jit, "compile_ir", compile_ir)

    def load(self) -> bool:
        before = self.compiled
        assert jit.load(self.kernel.name, self.kernel.ir)
        return self.compiled > before

    @property
    def file(self) -> Path:
        (found,) = self.folder.glob("*.o")
        return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    monkeypatch.setenv("GRAPHRT_KERNEL_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(private_files, "_told", set())
    yield Cache(tmp_path / "kernels", monkeypatch)


def test_a_kernel_is_kept_for_this_user_alone(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    old = os.umask(0)
    try:
        assert cache.load() and not cache.load()
    finally:
        os.umask(old)
    assert os.lstat(cache.file).st_mode & 0o777 == 0o600 and os.lstat(cache.folder).st_mode & 0o777 == 0o700
    assert caplog.messages == []


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _linked_to(target: str) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        path.rename(path.with_name("moved"))
        path.symlink_to(target)

    return plant


def _other_bytes(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def _too_large(path: Path) -> None:
    code = path.read_bytes()[32:] + bytes(jit._MOST_BYTES)
    path.write_bytes(hashlib.sha256(code).digest() + code)


PLANTED: dict[str, tuple[Callable[[Path], None], str]] = {
    "fifo": (_fifo, "is no regular file"),
    "link": (_linked_to("moved"), "is a symbolic link"),
    "link to a device": (_linked_to("/dev/zero"), "is a symbolic link"),
    "others may write": (lambda path: path.chmod(0o666), "may be written by others"),
    "other bytes": (_other_bytes, "is damaged"),
    "cut": (lambda path: os.truncate(path, 20), "is damaged"),
    "large": (_too_large, "at most"),
}


@pytest.mark.timeout(120)  # a FIFO opened the usual way never opens, a device never ends
@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_file_is_told_and_compiled_and_replaced(
    kind: str, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    plant, says = PLANTED[kind]
    assert cache.load()
    plant(cache.file)
    assert cache.load(), "it was loaded"
    assert len(caplog.messages) == 1 and says in caplog.text and "\n" not in caplog.messages[0]
    assert not cache.load() and len(caplog.messages) == 1, "a good file took its place"


def test_a_file_of_another_user_is_not_loaded(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert cache.load()
    real, file = os.lstat, str(cache.file)

    def lstat(path: str | Path) -> os.stat_result:
        info = real(path)
        return os.stat_result([*info[:4], 4711, *info[5:]]) if str(path) == file else info

    monkeypatch.setattr(os, "lstat", lstat)
    assert cache.load() and "belongs to user 4711" in caplog.text


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_folder_that_others_may_write_is_not_used(
    mode: int, cache: Cache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert cache.load()
    code = cache.file.read_bytes()
    cache.folder.chmod(mode)
    cache.file.write_bytes(code)
    assert cache.load(), "it was loaded from a folder that others may write"
    assert not cache.load(), "it was kept in a temporary folder"
    assert (tmp_path / f"graphrt-{os.geteuid()}" / "kernels" / cache.file.name).exists()
    assert len(caplog.messages) == 1 and "may be written by others" in caplog.text


def test_without_any_folder_kernels_are_compiled(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHRT_KERNEL_CACHE", "/dev/null/kernels")
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")
    assert jit.cache_dir() is None and cache.load() and cache.load()


def test_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHRT_KERNEL_CACHE", "~/kernels")
    assert jit.cache_dir() == (tmp_path / "kernels").resolve() and not (tmp_path / "~").exists()


def test_kernels_lie_in_the_cache_folder_unless_they_have_one_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHRT_CACHE", str(tmp_path / "all"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    for asked, found in (("", "all/kernels"), (str(tmp_path / "own"), "own"), ("0", None)):
        monkeypatch.setenv("GRAPHRT_KERNEL_CACHE", asked)
        assert jit.cache_dir() == (found and (tmp_path / found).resolve())
    monkeypatch.delenv("GRAPHRT_CACHE")
    monkeypatch.delenv("GRAPHRT_KERNEL_CACHE")
    assert jit.cache_dir() == (tmp_path / "user/graphrt/kernels").resolve()


def test_leftovers_of_killed_processes_go(cache: Cache) -> None:
    cache.folder.mkdir()
    old, new = cache.folder / "writing-a0b1c2d3", cache.folder / "writing-e4f5a6b7"
    first = cache.folder / "tmpq1w2e3r4"  # as earlier versions named them
    for path in (old, new, first):
        path.write_bytes(b"half a kernel")
    for path in (old, first):
        os.utime(path, (time.time() - 86400,) * 2)
    cache.load()
    assert not old.exists() and not first.exists() and new.exists()


_NO_HOME = """
import os, pwd, sys
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
from graphrt.tools import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_verb_without_a_home(tmp_path: Path) -> None:
    """No HOME and no line in /etc/passwd, as in many containers."""
    env = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME", "USER", "LOGNAME")}
    env |= {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _NO_HOME, "test", "-b", "cpu-fast", "-o", "SCALE"],
        env=env, cwd=tmp_path / "here", capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / f"graphrt-{os.geteuid()}").glob("test-state.json"))
    assert list((tmp_path / "here").iterdir()) == [], "nothing lies in the working directory"


def test_where_nothing_can_be_written_workers_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that is read-only throughout: their errors are kept in memory, and no folder is asked for
    before torch's own OpenMP library was found."""
    from graphrt.backends.cpu.fast import pool
    from graphrt.tools.conformance.run.pool import _scratch_file

    def refuse(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with _scratch_file() as file:
        file.write(b"said")
        file.seek(0)
        assert file.read() == b"said"
    monkeypatch.setattr("ctypes.util.find_library", refuse)
    list(pool._openmp_paths())


def test_what_ran_is_not_noted_where_nothing_can_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from graphrt.tools import cli

    monkeypatch.setenv("GRAPHRT_CACHE", "/dev/null/cache")
    assert cli.main(["test", "-b", "cpu", "-o", "SCALE", "-p", "special"]) == 0
    assert "won't know of this run" in capsys.readouterr().err


# ---- Triton's ----


def test_triton_keeps_its_kernels_in_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would load a stranger's machine code from a folder that all may write."""
    knobs = pytest.importorskip("triton").knobs
    from graphrt.backends.triton.kernel_cache import keep_private

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(private_files, "_told", set())
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    for asked, used in ((mine, mine), (theirs, tmp_path / f"graphrt-{os.geteuid()}" / "triton")):
        monkeypatch.setenv("TRITON_CACHE_DIR", "")  # setting the knob sets it
        monkeypatch.setattr(knobs.cache, "dir", str(asked))
        keep_private.__wrapped__()
        assert knobs.cache.dir == str(used.resolve())
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("GRAPHRT_CACHE", str(tmp_path / "all"))
    keep_private.__wrapped__()
    assert knobs.cache.dir == str((tmp_path / "all/triton").resolve())
    assert len(caplog.messages) == 1 and "may be written by others" in caplog.text
