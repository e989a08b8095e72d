"""hf:OWNER/REPO[:QUANT]: which file of a repository that is. The Hub's library is replaced."""

# ruff: noqa: F401, F811 (fixtures of test_hub.py)

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from support import ROOT
from test_hub import CONTENT, FakeHub, cache, http_error, leftovers, message, use_fake

from graphrt.errors import HubError
from graphrt.models import hub_partial
from graphrt.models.hub import pull, resolve
from graphrt.models.hub_hf_repo import choose, is_repository, models_of

FILES = [
    "README.md",
    "m-Q2_K.gguf",
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m-Q8_0.gguf",
    "mmproj-m-f16.gguf",
    "imatrix.gguf",
]


class FakeApi:
    """Stands for huggingface_hub.HfApi. files: by repository; error: what is raised instead."""

    files: dict[str, list[str]] = {}
    error: Exception | None = None

    def list_repo_files(self, repo: str) -> list[str]:
        if self.error is not None:
            raise self.error
        return self.files[repo]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setattr(FakeApi, "files", {"org/repo": FILES})
    monkeypatch.setattr(FakeApi, "error", None)
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    return use_fake(monkeypatch, FakeHub(dict.fromkeys(FILES, CONTENT)))


@pytest.mark.parametrize(
    ("name", "file"),
    [("hf:org/repo", "m-Q4_K_M.gguf"), ("hf:org/repo:Q8_0", "m-Q8_0.gguf"), ("hf:org/repo:q4_k_s", "m-Q4_K_S.gguf")],
)
def test_a_repository_is_asked_for_its_files(name: str, file: str, fake: FakeHub, cache: Path) -> None:
    assert pull(name) == resolve(name) == cache / "hf" / "org" / "repo" / file
    assert fake.fetched == [file], "the second time it is in the cache"


def test_a_type_that_is_not_there_is_answered_with_those_that_are(fake: FakeHub) -> None:
    text = message("hf:org/repo:Q4_K")
    assert "it has none: m-Q2_K.gguf, m-Q4_K_M.gguf, m-Q4_K_S.gguf, m-Q8_0.gguf." in text
    assert "README" not in text and "mmproj" not in text and "imatrix" not in text


def test_all_parts_of_a_split_model_are_fetched(fake: FakeHub, cache: Path) -> None:
    parts = [f"Q4_K_M/m-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    FakeApi.files["org/repo"] = ["m-Q8_0.gguf", *reversed(parts)]
    fake.files = fake.files | dict.fromkeys(parts, CONTENT)
    fake.etags = fake.etags | dict.fromkeys(parts, fake.etags["m-Q8_0.gguf"])
    assert pull("hf:org/repo") == cache / "hf" / "org" / "repo" / parts[0]
    assert fake.fetched == parts and (cache / "hf" / "org" / "repo" / parts[1]).exists()


def test_without_the_hub_the_cache_is_looked_at(
    fake: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = pull("hf:org/repo:Q8_0")
    monkeypatch.setattr(FakeApi, "error", http_error("HfHubHTTPError", 503))
    assert pull("hf:org/repo") == pull("hf:org/repo:Q8_0") == path
    assert "the Hub answered 503" in caplog.text
    assert "it has none: m-Q8_0.gguf" in message("hf:org/repo:Q2_K")
    assert "the Hub answered 503" in message("hf:org/other")
    monkeypatch.setattr(FakeApi, "error", http_error("RepositoryNotFoundError"))
    assert "no such repository" in message("hf:org/repo")


@pytest.mark.parametrize(
    ("files", "quant", "found"),
    [
        (["a.gguf"], None, "a.gguf"),
        (["a-f16.gguf"], "F16", "a-f16.gguf"),
        (["m.Q4_K_M.gguf", "m.Q6_K.gguf"], "Q6_K", "m.Q6_K.gguf"),
        (["m_q4_k_m.gguf", "m_q8_0.gguf"], None, "m_q4_k_m.gguf"),
        (["IQ4_XS/m.gguf", "Q8_0/m.gguf"], "IQ4_XS", "IQ4_XS/m.gguf"),
    ],
)
def test_choices(files: list[str], quant: str | None, found: str) -> None:
    assert choose("o/r", models_of(files), quant) == found


@pytest.mark.parametrize(
    ("files", "quant", "says"),
    [
        ([], None, "has no GGUF file"),
        (["README.md", "model.safetensors"], None, "has no GGUF file"),
        (["a.gguf", "b.gguf"], None, "one file of Q4_K_M .* none: a.gguf, b.gguf"),
        (["a.gguf"], "Q8_0", "one file of Q8_0 .* none: a.gguf"),
        (["x/m-Q4_K_M.gguf", "y/m-Q4_K_M.gguf", "m-Q8_0.gguf"], None, "it has 2: x/m-Q4_K_M.gguf, y/m-Q4_K_M.gguf"),
        ([f"m{i}.gguf" for i in range(99)], None, "and 69 more"),
        (["\x1b[2J.gguf", "b.gguf"], None, r"\\x1b"),
    ],
)
def test_no_choice(files: list[str], quant: str | None, says: str) -> None:
    with pytest.raises(HubError, match=says):
        choose("o/r", models_of(files), quant)


def test_names_of_repositories() -> None:
    assert all(map(is_repository, ("hf:a/b", "hf:a/b:Q4_0", "hf:a.b-c/d_e:IQ4_XS")))
    assert not any(map(is_repository, ("a/b", "hf:a", "hf:a/b/c", "hf:a/b:", "hf:../b", "hf:a/..", "hf:a/b:c/d")))


def test_a_name_that_leaves_the_repository_is_refused(fake: FakeHub) -> None:
    """A list from the Hub is a stranger's too."""
    FakeApi.files["org/repo"] = ["../../../x-Q4_K_M.gguf"]
    assert "hf:OWNER/REPO/FILE" in message("hf:org/repo")


# ---- what killed pulls leave ----


def test_what_a_killed_pull_left_goes_with_the_next(fake: FakeHub, cache: Path) -> None:
    """At once, by the lock that the system lets go, and what a living one holds stays."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom graphrt.models.hub import partial_folder\n"
        f"with partial_folder(Path({str(cache)!r}), 'hf') as folder:\n"
        "    (folder / 'm.gguf.incomplete').write_bytes(b'half')\n    print(folder, flush=True)\n    time.sleep(600)\n"
    )
    pulls = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT)})
        for _ in range(2)
    ]
    try:
        killed, living = (Path(p.stdout.readline().strip()) for p in pulls if p.stdout is not None)
        pulls[0].send_signal(signal.SIGKILL)
        pulls[0].wait(60)
        assert (killed / "m.gguf.incomplete").exists()
        pull("hf:org/repo")
        assert leftovers(cache) == [living] and (living / "m.gguf.incomplete").exists()
    finally:
        for process in pulls:
            process.kill()
            process.communicate(timeout=60)
    with hub_partial.partial_folder(cache, "hf", ["hf"]) as mine:
        assert leftovers(cache) == [mine]
    assert leftovers(cache) == []
