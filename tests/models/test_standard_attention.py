"""Attention as three ops (flash_attn=False, -fa off): the same logits, other nodes; what it refuses; diff of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import tiny_archs  # noqa: F401  (more models for tiny)
from support.tiny import CHAT, write_model

from graphrt import ops
from graphrt.errors import SessionError
from graphrt.models import load
from graphrt.models.attention import AttentionParams, standard_attention
from graphrt.models.engine import SessionOptions
from graphrt.tensor import new_input
from graphrt.testing import nmse
from graphrt.tools import cli

TOKENS = [3, 7, 11, 2, 9, 4]
#: A softcap, a window, sinks, ALiBi, V inside K.
ARCHS = ("llama", "gemma2", "gemma3", "gpt-oss", "mpt", "deepseek2")
#: Caches in f32: in f16 a sum's last bit may decide how an element is rounded, which is 1e-11 of the logits.
F32 = SessionOptions(n_ctx=64, type_k="f32", type_v="f32")
SIZES = (("f32", 5, 6), ("f16", 40, 3), ("f16", 40, 3))


@pytest.mark.parametrize("arch", ARCHS)
def test_logits_are_those_of_the_fused_op(tmp_path: Path, arch: str) -> None:
    model = load(write_model(tmp_path / "m.gguf", arch), "cpu", exact=True)
    fused, apart = (model.session(replace(F32, flash_attn=fa)) for fa in (True, False))
    for step in (TOKENS, [5], [8]):
        assert nmse(apart.eval(step), fused.eval(step)) < 1e-12
    found = [node.op for node in apart.executable(1, 1).graph.nodes]
    assert "FLASH_ATTN_EXT" not in found and found.count("SOFT_MAX") >= model.decoder.hp.n_layer
    assert "FLASH_ATTN_EXT" in [node.op for node in fused.executable(1, 1).graph.nodes]


def test_several_sequences(tmp_path: Path) -> None:
    model = load(write_model(tmp_path / "m.gguf", "llama"), "cpu", exact=True)
    fused, apart = (model.engine(2, replace(F32, flash_attn=fa)) for fa in (True, False))
    for tokens in ({0: TOKENS, 1: TOKENS[:3]}, {0: [5], 1: [9]}):
        assert nmse(apart.read(tokens), fused.read(tokens)) < 1e-12


def test_scores_and_weights_lie_in_memory() -> None:
    q, k, v = (new_input(kind, 32, n, h, 2, name=kind + str(n)) for kind, n, h in SIZES)
    mask = new_input("f16", 40, 5, 1, 2, name="mask")
    out = standard_attention(q, k, v, mask, AttentionParams(0.25, 0.0, 0.0, None), "attn")
    alike = ops.flash_attn_ext(q, k, v, mask, 0.25)
    assert (out.ne, out.nb, out.dtype, out.name) == (alike.ne, alike.nb, alike.dtype, "attn")
    weights = next(out.sources()).src[0].src[1]  # type: ignore[union-attr]
    assert weights is not None and (weights.op, weights.ne) == ("SOFT_MAX", (40, 5, 6, 2))
    assert weights["a"].op == "MUL_MAT" and weights["a"].ne == weights.ne


@pytest.mark.parametrize("given", [{"type_k": "q8_0"}, {"type_v": "q4_0"}, {"page": 16}])
def test_what_it_does_not_read(tmp_path: Path, given: dict[str, object]) -> None:
    model = load(write_model(tmp_path / "m.gguf", "llama"), "cpu")
    said = "attention without flash_attn reads a ring of f16, bf16 or f32, got"
    with pytest.raises(SessionError, match=said):
        model.engine(1, SessionOptions(n_ctx=64, flash_attn=False, **given))  # type: ignore[arg-type]


def test_diff_compares_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_model(tmp_path / "m.gguf", "llama", tokenizer="spm", chat=CHAT))
    asked = ["diff", path, "--tokens", "3,7,11", "-c", "64", "-a", "cpu"]
    code = cli.main([*asked, "-b", "cpu-fast,fa=off", "--all"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0, lines
    rows = [line.split() for line in lines]
    named = [row[1] for row in rows if len(row) > 5 and row[0].isdigit()]
    assert "__fattn__-0" in named and "l_out-1" in named and not any(n.startswith("node_") for n in named)
    (op,) = {row[2] for row in rows if len(row) > 5 and row[1] == "__fattn__-0"}
    assert op == "CONT", "of the other side, whose numbers the table has"
    for option in (["--resync"], ["--cut"]):
        assert cli.main([*asked, "-b", "cpu,fa=off", *option]) == 2
        assert "need sides of the same nodes" in capsys.readouterr().err
    assert cli.main([*asked, "-b", "cpu,fa=maybe"]) == 2 and "fa must be on, or off" in capsys.readouterr().err


def test_the_flag_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_model(tmp_path / "m.gguf", "llama", tokenizer="spm", chat=CHAT))
    found = {}
    for flags in ([], ["-fa", "off"], ["--flash-attn=off"], ["-fa"], ["-fa", "auto"]):
        assert cli.main(["dump", path, *flags, "-c", "64", "--backend", "cpu"]) == 0
        found[" ".join(flags)] = "FLASH_ATTN_EXT" in capsys.readouterr().out
    assert found == {"": True, "-fa off": False, "--flash-attn=off": False, "-fa": True, "-fa auto": True}
    assert (
        cli.main(["logits", path, "--tokens", "3,7", "-fa", "off", "-ctv", "q8_0", "-o", str(tmp_path / "x.npy")]) == 2
    )
    assert "reads a ring of f16, bf16 or f32" in capsys.readouterr().err
