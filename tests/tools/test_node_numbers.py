"""A node has one number, by which every verb calls it, and each file that a verb writes is named on stderr."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support import verbs
from support.tiny import write_model

from graphrt.tools import cli

Run = Callable[..., verbs.Result]
STEP = ("model.gguf", "-c", "64")
EXACT = ("--backend", "cpu", "--exact")
PROMPT = ("--phase", "prefill", "-p", "hello the sea")
NAME = "ffn_norm-1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    write_model(folder / "model.gguf", "llama", tokenizer="spm")
    return folder


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(folder)

    def call(*argv: str) -> verbs.Result:
        capsys.readouterr()
        code = cli.main(list(argv))
        return verbs.Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def number(run: Run) -> int:
    """Of NAME in the dump, which leafs come before."""
    tensors = run("dump", *STEP, *EXACT, "--json").json()["tensors"]
    found = next(i for i, t in enumerate(tensors) if t["name"] == NAME)
    assert found > sum(t["op"] == "NONE" for t in tensors) > 10
    return found


def test_tables_have_the_dumps_number(run: Run, number: int) -> None:
    argvs = {
        "dump": ("dump", *STEP, *EXACT),
        "trace": ("trace", *STEP, *EXACT, *PROMPT),
        "diff": ("diff", *STEP, "-a", "cpu", "-b", "cpu", *PROMPT, "--all"),
    }
    for verb, argv in argvs.items():
        rows = [line.split() for line in run(*argv).out.splitlines()]
        assert {row[0] for row in rows if NAME in row[1:3]} == {str(number)}, (verb, rows)
    assert re.search(rf"^node +#{number} {NAME}: MUL ", run("explain", *STEP, *EXACT, f"#{number}").out, re.M)
    assert run("explain", *STEP, *EXACT, f"#{number}", "--json").json()["node"]["name"] == NAME


def test_json_has_the_dumps_number(run: Run, number: int) -> None:
    trace = run("trace", *STEP, *EXACT, *PROMPT, "--json").json()["nodes"]
    diff = run("diff", *STEP, "-b", "cpu", *PROMPT, "--json").json()["modes"][0]["nodes"]
    assert [n["index"] for nodes in (trace, diff) for n in nodes if n["name"] == NAME] == [number] * 2


def test_the_first_bad_node_has_the_dumps_number(run: Run, number: int, tmp_path: Path) -> None:
    """In diff's sentence, under its plot and on the axis of its picture."""
    svg = tmp_path / "diff.svg"
    side = ("-b", "support.broken_backends:WrongStride")
    tensors = run("dump", *STEP, *EXACT, "--json").json()["tensors"]
    index = {t["name"]: i for i, t in enumerate(tensors)}
    first = min(i for i, t in enumerate(tensors) if t["op"] != "NONE")
    out = run("diff", *STEP, *side, *PROMPT, "--svg", str(svg)).out
    assert "__fattn__-0 = FLASH_ATTN_EXT" in out and f"layer 0, #{index['__fattn__-0']}\n" in out
    assert re.search(rf"#{first} +#{len(tensors) - 1}\n", out)
    ticks = [int(t) for t in re.findall(r'<text text-anchor="middle" x="[\d.]+" y="483">(\d+)</text>', svg.read_text())]
    assert len(ticks) > 3 and all(first <= t < len(tensors) for t in ticks)


def test_check_says_why_the_dump_has_more_nodes(run: Run) -> None:
    tensors = run("dump", *STEP, *EXACT, "--json").json()["tensors"]
    nodes = sum(t["op"] != "NONE" for t in tensors)
    views = sum(t["op"] in ("RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE") for t in tensors)
    out = run("check", *STEP, "-b", "cpu").out
    said = f"all {nodes - views} nodes that compute, one split, no copies (of {nodes} nodes {views} are views"
    assert views > 5 and said in out.splitlines()[1]


WRITERS = {
    "dump": ("dump", *STEP, *EXACT, "--format", "html", "-o", "FILE.html"),
    "explain": ("explain", *STEP, "__fattn__-0", "--device", "h100", "--svg", "FILE.svg"),
    "memory": ("memory", *STEP, *EXACT, "--svg", "FILE.svg", "--overlay", "FILE.json"),
    "trace": ("trace", *STEP, *EXACT, *PROMPT, "-o", "FILE.npz", "--overlay", "FILE.json"),
    "diff": ("diff", *STEP, "-b", "cpu", *PROMPT, "--svg", "FILE.svg", "--overlay", "FILE.json"),
    "logits": ("logits", *STEP, "--tokens", "1,2", "-o", "FILE.npy"),
    "test": ("test", "-b", "cpu", "-o", "SUM_ROWS", "-j", "0", "-O", "FILE.txt"),
    "test support": ("test", "support", "-b", "cpu", "-o", "SUM_ROWS", "-O", "FILE.txt"),
}


@pytest.mark.parametrize("verb", WRITERS)
def test_what_was_written_is_said(run: Run, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if verb == "explain":
        pytest.importorskip("triton")
    monkeypatch.setenv("GRAPHRT_CACHE", str(tmp_path / "cache"))
    argv = [a.replace("FILE", str(tmp_path / "out")) for a in WRITERS[verb]]
    result = run(*argv)
    files = sorted(p for p in tmp_path.iterdir() if p.name.startswith("out"))
    assert result.code == 0 and len(files) == sum("FILE" in a for a in WRITERS[verb])
    said = sorted(line for line in result.err.splitlines() if line.startswith("wrote "))
    assert [line.rpartition(", ")[0] for line in said] == [f"wrote {file}" for file in files]
    assert all(re.fullmatch(r".*, [\d.]+ (B|KiB|MiB)", line) for line in said) and "wrote" not in result.out
    if argv[-1].endswith(".json"):
        json.loads(Path(argv[-1]).read_text())
