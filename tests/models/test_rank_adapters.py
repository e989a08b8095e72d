"""LoRA adapters over ranks: each rank's part of them adds up to what one rank has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import tiny_archs as tiny_archs
from support.adapters import write_adapter
from support.ranked import F32
from support.tiny import tokens, write_model

from graphrt.errors import SessionError
from graphrt.models import load

#: Of matrices whose rows are cut, of those that sum over what is cut, and of the output matrix.
TARGETS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@pytest.mark.parametrize(("name", "ranks", "stages"), [("llama", 2, 1), ("llama", 2, 2), ("qwen3", 4, 2)])
def test_ranks_have_their_parts(tmp_path: Path, name: str, ranks: int, stages: int) -> None:
    path, file = write_model(tmp_path / "m.gguf", name), tmp_path / "a.gguf"
    one, many = load(path, "cpu", exact=True), load(path, "cpu", exact=True, ranks=ranks, stages=stages)
    write_adapter(file, one, targets=TARGETS, more=("output.weight",))
    ids = tokens()[:9]
    plain = one.session(F32).eval_rows(ids)
    for model in (one, many):
        model.use_adapters({"a": file}, [0.5])
    wanted, found = (model.session(F32).eval_rows(ids) for model in (one, many))
    assert np.linalg.norm(wanted - plain) > 1e-2 * np.linalg.norm(plain)
    assert np.linalg.norm(found - wanted) < 3e-6 * np.linalg.norm(wanted)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    """By the whole matrix's shape, whatever part a rank has."""
    other, file = load(write_model(tmp_path / "o.gguf", "gemma3"), "cpu", exact=True), tmp_path / "a.gguf"
    write_adapter(file, other, targets=("attn_q",), keys={"general.architecture": "llama"})
    model = load(write_model(tmp_path / "m.gguf", "llama"), "cpu", exact=True, ranks=2)
    with pytest.raises(SessionError, match=r"must have sides of the shapes \[64, rank\] and \[rank, 64\]"):
        model.use_adapters({"a": file})
