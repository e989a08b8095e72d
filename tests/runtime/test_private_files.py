"""What a cache takes for its own: every kind of file and folder that another user can have had a hand in is refused.

Another user is played by a changed os.geteuid: what these tests make then belongs to somebody else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphrt import private_files
from graphrt.private_files import Untrusted, cache_folder, private_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")

ME = os.geteuid()


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Calling it makes us another user, to whom what exists is foreign (and root too, where root runs the tests)."""

    def become() -> None:
        real = os.lstat, os.fstat
        for name, stat in zip(("lstat", "fstat"), real, strict=True):
            monkeypatch.setattr(os, name, lambda *a, stat=stat: _owned_by(stat(*a), 4711))

    return become


def _owned_by(info: os.stat_result, uid: int) -> os.stat_result:
    """The same with another owner, but for what lies outside of the test: root's."""
    return os.stat_result([*info[:4], uid if info.st_uid == ME else info.st_uid, *info[5:]])


# ---- files ----


def _plain(path: Path) -> None:
    path.write_bytes(b"code")
    path.chmod(0o600)


def _link(path: Path) -> None:
    _plain(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _writable(mode: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        _plain(path)
        path.chmod(mode)

    return make


def _large(path: Path) -> None:
    _plain(path)
    os.truncate(path, 1 << 40)  # sparse: it takes no room


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (_link, "is a symbolic link"),
    "link to a device": (lambda path: path.symlink_to("/dev/zero"), "is a symbolic link"),
    "fifo": (os.mkfifo, "is no regular file"),
    "folder": (Path.mkdir, "is no regular file"),
    "written by a group": (_writable(0o660), "may be written by others"),
    "written by all": (_writable(0o602), "may be written by others"),
    "large": (_large, "must have 1000 bytes at most"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
@pytest.mark.timeout(60)  # a FIFO that is opened the usual way never opens
def test_a_file_that_another_can_have_made_is_refused(kind: str, tmp_path: Path) -> None:
    make, says = BAD_FILES[kind]
    make(tmp_path / "file")
    with pytest.raises(Untrusted, match=says):
        private_files.read(tmp_path / "file", 1000)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "link", "link to a device"])
def test_a_file_that_changes_after_the_first_look_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the name and the opening another may lie there."""
    _plain(tmp_path / "good")
    good = os.lstat(tmp_path / "good")
    BAD_FILES[kind][0](tmp_path / "file")
    monkeypatch.setattr(os, "lstat", lambda path: good)
    with pytest.raises(OSError):
        private_files.read(tmp_path / "file", 1000)


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _plain(tmp_path / "file")
    info = os.lstat(tmp_path / "file")
    monkeypatch.setattr(os, "fstat", lambda fd: info)
    monkeypatch.setattr(os, "lstat", lambda path: info)
    (tmp_path / "file").write_bytes(bytes(2000))
    with pytest.raises(Untrusted, match="at most"):
        private_files.read(tmp_path / "file", 1000)


def test_a_file_of_another_user_is_refused(tmp_path: Path, stranger: Callable[[], None]) -> None:
    _plain(tmp_path / "file")
    assert private_files.read(tmp_path / "file", 1000) == b"code"
    stranger()
    with pytest.raises(Untrusted, match="belongs to user 4711"):
        private_files.read(tmp_path / "file", 1000)


def test_written_files_are_ours_alone_and_replace_links(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_bytes(b"precious")
    path.symlink_to(victim)
    old = os.umask(0)
    try:
        private_files.write(path, b"code")
    finally:
        os.umask(old)
    assert victim.read_bytes() == b"precious" and not path.is_symlink()
    assert private_files.read(path, 1000) == b"code" and os.lstat(path).st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "victim"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError):
        private_files.write(tmp_path / "file", b"code")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


_KILLED = """
import os, signal, sys
from pathlib import Path
from graphrt import private_files
os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
private_files.write(Path(sys.argv[1]), b"code")
"""


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / "file")], timeout=300)
    (left,) = tmp_path.iterdir()
    private_files.sweep(tmp_path)
    assert left.exists(), "another process may be writing it"
    kept = [
        tmp_path / name for name in ("writing-abcdefgh.o", "writing-x", "notes", "writing-a1b2c3d4", "writing-folder00")
    ]
    for path in kept[:3]:
        path.write_bytes(b"")
    kept[3].symlink_to("notes")
    kept[4].mkdir()
    for path in (left, *kept):
        os.utime(path, (time.time() - 7200,) * 2, follow_symlinks=False)
    private_files.sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept), "names that are not ours, links and folders stay"


# ---- folders ----


def test_missing_folders_are_made_for_us_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        assert private_folder(tmp_path / "a" / "b") == (tmp_path / "a" / "b").resolve()
    finally:
        os.umask(old)
    assert [os.lstat(tmp_path / p).st_mode & 0o777 for p in ("a", "a/b")] == [0o700, 0o700]


@pytest.mark.parametrize("mode", [0o702, 0o720, 0o1777])
def test_a_folder_that_others_may_write_is_refused(mode: int, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(Untrusted, match="may be written by others"):
        private_folder(tmp_path / "cache")


def test_a_folder_on_the_way_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """They could move ours away and put theirs in its place; not where the sticky bit is set."""
    open_to_all = tmp_path / "shared"
    open_to_all.mkdir()
    private_folder(open_to_all / "cache" / "kernels")
    for mode, fine in ((0o777, False), (0o1777, True), (0o755, True)):
        open_to_all.chmod(mode)
        if fine:
            private_folder(open_to_all / "cache" / "kernels")
        else:
            with pytest.raises(Untrusted, match="shared may be written by others"):
                private_folder(open_to_all / "cache" / "kernels")


def test_links_on_the_way_are_followed_and_checked(tmp_path: Path, stranger: Callable[[], None]) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("to/../disk")
    (tmp_path / "to").mkdir()
    assert private_folder(tmp_path / "link" / "cache") == (tmp_path / "disk" / "cache").resolve()
    (tmp_path / "to").chmod(0o777)
    with pytest.raises(Untrusted, match="to may be written"):
        private_folder(tmp_path / "link" / "cache")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="[Ll]evels of symbolic links"):
        private_folder(tmp_path / "loop")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        private_folder(tmp_path / "file")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, stranger: Callable[[], None]) -> None:
    folder = private_folder(tmp_path / "cache")
    stranger()
    with pytest.raises(Untrusted, match="belongs to user 4711"):
        private_folder(folder)


def test_a_link_of_another_user_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to("cache")
    real = os.lstat
    monkeypatch.setattr(os, "lstat", lambda p: _owned_by(real(p), 4711 if str(p).endswith("link") else ME))
    private_folder(tmp_path / "cache")
    with pytest.raises(Untrusted, match="link belongs to user 4711"):
        private_folder(tmp_path / "link")


def test_a_group_of_ones_own_may_write_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems give each user a group and the umask 002: ~/.cache is 0775 there."""
    import grp
    import pwd

    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o775)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me"))
    for name, members, fine in (("me", [], True), ("me", ["me"], True), ("me", ["you"], False), ("staff", [], False)):
        monkeypatch.setattr(grp, "getgrgid", lambda gid, g=SimpleNamespace(gr_name=name, gr_mem=members): g)
        if fine:
            private_folder(tmp_path / "home" / "cache")
            private_folder(tmp_path / "home", own_group=True)
            with pytest.raises(Untrusted, match="home may be written"):  # where code lies, nobody but its owner
                private_folder(tmp_path / "home")
        else:
            with pytest.raises(Untrusted, match="home may be written"):
                private_folder(tmp_path / "home" / "cache")
    (tmp_path / "home").chmod(0o777)
    with pytest.raises(Untrusted, match="home may be written"):
        private_folder(tmp_path / "home" / "cache")


# ---- which folder ----


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder, for one test."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(private_files, "_told", set())
    return folder


def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has neither HOME nor a line in /etc/passwd."""
    import pwd

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_the_users_cache(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert private_files.user_cache() == tmp_path / ".cache" / "graphrt"
    assert cache_folder("~/mine", "x") == (tmp_path / "mine").resolve()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert private_files.user_cache() == tmp_path / ".cache" / "graphrt"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(None, "x") == (tmp_path / "xdg" / "graphrt" / "x").resolve()


def test_without_a_home_a_temporary_folder_serves(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_home(monkeypatch)
    found = cache_folder(None, "kernels")
    assert found == (temporary / f"graphrt-{ME}" / "kernels").resolve() and cache_folder(None, "kernels") == found
    assert caplog.messages == []
    assert cache_folder("~/mine", "kernels") == found
    assert len(caplog.messages) == 1 and "no home folder is known" in caplog.text


@pytest.mark.parametrize("home", ["/dev/null", "/proc/self", "/graphrt-nonexistent"])
def test_where_home_cannot_be_written_a_temporary_folder_serves(
    home: str, temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", home)
    assert cache_folder(None, "kernels") == (temporary / f"graphrt-{ME}" / "kernels").resolve()
    assert caplog.messages == [] and not Path("/graphrt-nonexistent").exists(), "not even root makes a home"


def test_a_refused_folder_is_told_once(temporary: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "all").chmod(0o777)
    for _ in range(3):
        assert cache_folder(str(tmp_path / "all"), "kernels") == (temporary / f"graphrt-{ME}" / "kernels").resolve()
    assert len(caplog.messages) == 1 and "may be written by others" in caplog.text


def test_a_temporary_folder_that_another_has_made_is_refused(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name can be guessed."""
    no_home(monkeypatch)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(0o777)
    (temporary / f"graphrt-{ME}").symlink_to(tmp_path / "theirs")
    assert cache_folder(None, "kernels") is None
    assert "nothing is kept on disk" in caplog.text and list((tmp_path / "theirs").iterdir()) == []


def test_where_nothing_can_be_written_there_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    no_home(monkeypatch)

    def full() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", full)
    assert cache_folder(None, "kernels") is None
