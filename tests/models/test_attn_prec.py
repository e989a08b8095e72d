"""attn_prec: what attention multiplies in reaches the graph, and what can't be is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import CHAT, write_model

from graphrt.errors import SessionError
from graphrt.models import load
from graphrt.models.engine import ATTN_PRECS, SessionOptions
from graphrt.tools import cli, common


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "m.gguf", "llama", tokenizer="spm", chat=CHAT)


@pytest.mark.parametrize(("prec", "number"), [("auto", 0), ("f32", 10), ("f8", 8)])
def test_each_node_has_it(path: Path, prec: str, number: int) -> None:
    model = load(path, "cpu")
    session = model.session(SessionOptions(n_ctx=64, type_k="f8", type_v="f8", attn_prec=prec))
    for n in (1, 4):
        nodes = [x for x in session.executable(n, 1).graph.nodes if x.op == "FLASH_ATTN_EXT"]
        assert len(nodes) == model.decoder.hp.n_layer and {x.params.prec for x in nodes} == {number}
    chained = [x for x in session.chained().exe.graph.nodes if x.op == "FLASH_ATTN_EXT"]
    assert {x.params.prec for x in chained} == {number}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"attn_prec": "f16"}, "attn_prec must be one of auto, f32, f8, got 'f16'"),
        ({"attn_prec": "f8"}, "type_k and type_v must be f8_e4m3, they are f16 and f16; use type_k f8"),
        ({"attn_prec": "f8", "type_k": "f8"}, "they are f8_e4m3 and f16"),
        ({"attn_prec": "f32", "page": 16}, "attn_prec f32 is of flash_attn over a ring of cells, got pages"),
        ({"attn_prec": "f32", "flash_attn": False}, "got attention without flash_attn; use attn_prec auto"),
    ],
)
def test_what_is_refused(path: Path, given: dict[str, object], said: str) -> None:
    with pytest.raises(SessionError, match=said):
        load(path, "cpu").engine(1, SessionOptions(n_ctx=64, **given))  # type: ignore[arg-type]


def test_the_flag_is_seen_in_explain(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--backend", "cpu", "-c", "64", "-ctk", "f8", "-ctv", "f8"]
    for more, said in (([], "prec 0,"), (["--attn-prec", "f8"], "prec 8,"), (["--attn-prec", "f32"], "prec 10,")):
        assert cli.main(["explain", str(path), "__fattn__-0", *flags, *more]) == 0
        assert said in capsys.readouterr().out


def test_the_flag_names_what_the_options_do() -> None:
    assert tuple(ATTN_PRECS) == common.ATTN_PRECS


def test_a_side_of_diff_has_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["diff", str(path), "--tokens", "3,7,11", "-c", "64", "-ctk", "f8", "-ctv", "f8", "-a", "cpu"]
    assert cli.main([*asked, "-b", "cpu,prec=f8"]) == 0
    assert cli.main([*asked, "-b", "cpu,prec=f4"]) == 2 and "attn_prec must be one of" in capsys.readouterr().err
