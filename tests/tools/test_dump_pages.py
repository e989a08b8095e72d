"""What `graphrt dump` shows of a step over pages, in every format: how they are cut, tables, what sequences share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny import write_model

from graphrt.backends.cpu.backend import CpuBackend
from graphrt.models.paging import prefixes
from graphrt.tools import cli
from graphrt.tools.inspect import graph_json

CUT = "pages of 32 tokens: 9 full; each sequence's table has 8 entries"
SHARED = "prefixes: prefixes are read once (4 sequences share 2 pages)"


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Four sequences that begin alike, on a backend that reads that once."""
    write_model(tmp_path / "llama.gguf", "llama")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CpuBackend, "reads_shared_once", True)
    monkeypatch.setattr(prefixes, "LAUNCH_BYTES", 1000)
    options = ["--backend", "cpu", "-c", "256", "--page", "32", "--pages", "9", "--sequences", "4", "--shared", "70"]
    return ["dump", "llama.gguf", *options]


def test_text(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert CUT in said and SHARED in said and "FLASH_ATTN_VARLEN" in said
    assert "attn_inp_pages" in said and "attn_inp_prefixes" in said


@pytest.mark.parametrize("kind", ["json", "html", "dot"])
def test_other_formats_have_it_in_their_title(argv: list[str], capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert cli.main([*argv, "--format", kind]) == 0
    said = capsys.readouterr().out.replace("&#x27;", "'").replace("&#39;", "'").replace("\\u0027", "'")
    assert CUT in said and SHARED in said


def test_the_graph_says_which_tables_attention_reads(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each attention's sources are the tables, one column a sequence, and groups; JSON is read back."""
    assert cli.main([*argv, "--json"]) == 0
    text = capsys.readouterr().out
    tensors = json.loads(text)["tensors"]
    attentions = [t for t in tensors if t["op"] == "FLASH_ATTN_VARLEN"]
    assert attentions
    for node in attentions:
        sources = [tensors[i] for i in node["src"] if i is not None]
        named = {t["name"].rpartition(" ")[0] or t["name"]: t for t in sources}
        assert named["attn_inp_pages"]["ne"] == [8, 4, 1, 1] and named["attn_inp_pages"]["dtype"] == "i32"
        assert named["attn_inp_prefixes"]["ne"][0] == 3
        keys = sources[1]
        assert keys["ne"][1] == 32 and keys["ne"][3] == 9
    assert len(graph_json.graph_of(graph_json.loads(text)).nodes) > 0
