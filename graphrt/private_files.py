"""Files and folders that nobody but this user and root can have written.

What is read back from a cache is run (machine code) or believed (checksums), and the cache may lie where others can
write: in /tmp, in a shared folder. So a folder is used only when no other user can change it or any folder on the way
to it, and a file only when it is a regular one that no other user can have made. Everything else raises an OSError,
Untrusted where somebody else had a hand in it. On Windows, where a mode doesn't tell who may write, owners and modes
are not looked at.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import BinaryIO

from graphrt import whole_files

log = logging.getLogger(__name__)

_POSIX = os.name == "posix"
# NONBLOCK: a FIFO without a writer must not hold us up; NOCTTY: nor may a terminal become ours.
_OPEN_FLAGS = functools.reduce(
    int.__or__, (getattr(os, f"O_{name}", 0) for name in ("NOFOLLOW", "NONBLOCK", "NOCTTY", "CLOEXEC", "BINARY"))
)
_told: set[str] = set()
_MOST_LINKS = 40  # on the way to one folder, as the kernel has it
_TEMPORARY = re.compile(r"(writing-|tmp)[a-z0-9_]{8}")  # ours while they are written; "tmp": of graphrt 0.1
_STALE_SECONDS = 3600  # writing takes milliseconds


class Untrusted(OSError):
    """Another user can have written what lies there, or it is not what it should be. str() is the reason."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(errno.EPERM, reason, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


# ---- where caches lie ----


def expanded(path: str) -> Path:
    """The path with ~ replaced by a home folder. Raises OSError where that is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "no home folder is known that ~ could stand for", path) from None


def user_cache() -> Path:
    """$XDG_CACHE_HOME/graphrt, else ~/.cache/graphrt. It need not exist. Raises OSError where no home is known."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path would mean another folder, maybe a stranger's, in each working directory.
    return (Path(base) if os.path.isabs(base) else expanded("~/.cache")) / "graphrt"


def make_user_cache() -> Path:
    """user_cache(), made where it is missing. Raises OSError."""
    folder = user_cache()
    if not folder.is_dir():
        if not os.path.isabs(os.environ.get("XDG_CACHE_HOME", "")):
            check_home()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def check_home() -> None:
    """Raises OSError unless there is a home folder: whoever has none is often told of /nonexistent, and to make a home
    is not for us."""
    if not (home := expanded("~")).is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(home))


def temporary_cache() -> Path:
    """Where caches lie that have no better place: a folder with the user's id in the system's temporary folder.

    It need not exist, and others can guess its name: private_folder() makes it and refuses one that is not ours.
    Raises OSError where no temporary folder can be written.
    """
    return Path(tempfile.gettempdir()).absolute() / f"graphrt-{os.geteuid() if _POSIX else 'cache'}"


def cache_folder(asked: str | None, name: str, *, own_group: bool = False) -> Path | None:
    """A private folder for what `name` says: `asked`, else user_cache()/name; where that can't be used, a temporary
    one; None where none can be had. A folder that is not used although asked for, or because of others, is told once.

    own_group: as private_folder() has it.
    """
    try:
        return private_folder(expanded(asked) if asked else make_user_cache() / name, own_group=own_group)
    except OSError as error:
        refused = error
    try:
        instead: Path | None = private_folder(temporary_cache() / name)
    except OSError as error:
        instead = None
        refused = error if isinstance(error, Untrusted) else refused
    if asked or isinstance(refused, Untrusted):
        where = f"{instead} is used instead" if instead else "nothing is kept on disk"
        say_once(
            f"{refused.filename} for {name}",
            f"a folder for {name} must be one that only you can write: {reason(refused)}; {where}",
        )
    return instead


def reason(error: OSError) -> str:
    """What went wrong, and where, in a few words."""
    if isinstance(error, Untrusted):
        return str(error)
    what = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {what}" if error.filename else what


def say_once(about: str, sentence: str) -> None:
    """A warning that a process gives once, and none other about the same."""
    if about not in _told:
        _told.add(about)
        log.warning("%s", sentence)


# ---- folders ----


def private_folder(path: Path, *, own_group: bool = False) -> Path:
    """The folder's real path; what is missing of it is made, for this user alone.

    The folder may be written by its owner alone, who is this user or root. So may every folder on the way, also through
    links, except that others may write where the sticky bit keeps them from moving what is not theirs (/tmp), and that
    the user's own group may, which on many systems nobody else is in. own_group: it may write the folder itself too,
    for folders that other programs make. Raises OSError.
    """
    left = list(reversed(path.absolute().parts))
    here, links = left.pop(), 0
    while left:
        _check_folder(here, os.lstat(here))
        part = left.pop()
        if part == "..":
            here = os.path.dirname(here)
            continue
        step = os.path.join(here, part)
        info = _made(step)
        if not stat.S_ISLNK(info.st_mode):
            here = step
            continue
        _check_owner(step, info)
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        target = Path(os.path.join(here, os.readlink(step))).parts
        here = target[0]
        left += reversed(target[1:])
    _check_folder(here, os.lstat(here), sticky=False, own_group=own_group)
    return Path(here)


def _made(path: str) -> os.stat_result:
    """lstat of a folder that is made where it is missing."""
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path)
    with contextlib.suppress(FileExistsError):  # another process was quicker
        os.mkdir(path, 0o700)
    return os.lstat(path)


def check_folder(path: Path) -> None:
    """Raises OSError unless the path is a folder, no link, of this user or root, into which no other user may write."""
    _check_folder(os.fspath(path), os.lstat(path), sticky=False)


def _check_folder(path: str, info: os.stat_result, *, sticky: bool = True, own_group: bool = True) -> None:
    """sticky: others may write under the sticky bit; own_group: the user's own group may write."""
    if stat.S_ISLNK(info.st_mode):
        raise Untrusted(path, "is a symbolic link, no folder")
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    _check_owner(path, info)
    if not (sticky and info.st_mode & stat.S_ISVTX) and not (own_group and _is_own_group(path, info)):
        _check_mode(path, info)


def is_own(info: os.stat_result) -> bool:
    """It belongs to this user."""
    return not _POSIX or info.st_uid == os.geteuid()


def _check_owner(path: str | os.PathLike[str], info: os.stat_result) -> None:
    if _POSIX and info.st_uid not in (os.geteuid(), 0):
        raise Untrusted(path, f"belongs to user {info.st_uid}")


def _check_mode(path: str | os.PathLike[str], info: os.stat_result) -> None:
    if _POSIX and info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Untrusted(path, f"may be written by others (mode {stat.S_IMODE(info.st_mode):04o}; chmod go-w mends it)")


def _is_own_group(path: str, info: os.stat_result) -> bool:
    """Of others only a group may write, and it is this user's own: many systems give each user one, and umask 002."""
    if not _POSIX or info.st_mode & stat.S_IWOTH:
        return False
    import grp  # these two are missing on Windows
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(info.st_gid)
        with_list = hasattr(os, "listxattr") and "system.posix_acl_access" in os.listxattr(path)
    except (KeyError, OSError):
        return False
    # Under an access list the group's bits are those of everyone on it.
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name} and not with_list


# ---- files ----


def read(path: Path, most: int) -> bytes:
    """A file's bytes: a regular file (no link) of this user or root that nobody else may write, of `most` bytes at
    most. Raises OSError: FileNotFoundError where there is none, Untrusted for another kind of file.
    """
    with opened(path, most) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Untrusted(path, f"must have {most} bytes at most, it has more")
    return data


@contextlib.contextmanager
def opened(path: Path, most: int = 1 << 62) -> Generator[BinaryIO, None, None]:
    """The same file, to be read. Raises OSError as read() does."""
    _check_file(path, os.lstat(path), most)  # first by name: merely opening a device can do something
    with open(os.open(path, os.O_RDONLY | _OPEN_FLAGS), "rb") as file:
        _check_file(path, os.fstat(file.fileno()), most)
        yield file


def _check_file(path: Path, info: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise Untrusted(path, "is a symbolic link" if stat.S_ISLNK(info.st_mode) else "is no regular file")
    _check_owner(path, info)
    _check_mode(path, info)
    if info.st_size > most:
        raise Untrusted(path, f"must have {most} bytes at most, got {info.st_size}")


def write(path: Path, data: bytes | Iterable[bytes], mode: int = 0o600) -> None:
    """Writes a file that this user alone can read and write (or of another mode), in one step: whoever reads it finds
    all of it or what was there before. A link in its place is replaced. data: in one piece, or in several as they come.
    Raises OSError.
    """
    with whole_files.replacing(path, mode, prefix="writing-") as file:
        file.writelines([data] if isinstance(data, bytes) else data)


def sweep(folder: Path) -> None:
    """Deletes what processes that were killed while they wrote have left in the folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _TEMPORARY.fullmatch(entry.name) is None:
                continue
            with contextlib.suppress(OSError):  # another process may be sweeping as well
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(info.st_mode) and is_own(info) and time.time() - info.st_mtime > _STALE_SECONDS:
                    os.unlink(entry.path)
