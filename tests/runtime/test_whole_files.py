"""Files that are there when they are whole, or not at all."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from graphrt.whole_files import writing


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with writing(path) as out:
        out.write(b"new")
        out.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["a"]


def test_nothing_is_left_of_what_failed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for before in (None, b"old"):
        with pytest.raises(KeyboardInterrupt), writing(path) as out:
            out.write(b"half")
            raise KeyboardInterrupt
        assert (path.read_bytes() if path.exists() else None) == before
        path.write_bytes(b"old")
    assert os.listdir(tmp_path) == ["a"]


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    with writing(tmp_path / "new"):
        pass
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link, pipe, target = tmp_path / "link", tmp_path / "pipe", tmp_path / "folder" / "target"
    link.symlink_to(target)
    with writing(link) as out:
        out.write(b"text")
    assert link.is_symlink() and target.read_bytes() == b"text"
    os.mkfifo(pipe)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    with writing(pipe) as out:
        out.write(b"text")
    reader.join()
    assert found == [b"text"] and pipe.is_fifo()
    with pytest.raises(IsADirectoryError), writing(tmp_path / "folder"):
        pass
