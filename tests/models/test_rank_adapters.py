"""LoRA adapters over ranks: each rank's part of them adds up to what one rank has, and is all that it reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import tiny_archs as tiny_archs
from support.adapters import write_adapter
from support.ranked import F32, Alone
from support.tiny import tokens, write_model

from graphrt.errors import SessionError
from graphrt.models import load
from graphrt.models.gguf import GGUFFile

#: Of matrices whose rows are cut, of those that sum over what is cut, and of the output matrix.
TARGETS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@pytest.mark.parametrize(
    ("name", "ranks", "stages", "quantized"),
    [("llama", 2, 1, False), ("llama", 2, 2, False), ("qwen3", 4, 2, False), ("llama", 2, 1, True)],
)
def test_ranks_have_their_parts(tmp_path: Path, name: str, ranks: int, stages: int, quantized: bool) -> None:
    """quantized: a rank's columns begin within an adapter's block, or with one."""
    path, file = write_model(tmp_path / "m.gguf", name), tmp_path / "a.gguf"
    one, many = load(path, "cpu", exact=True), load(path, "cpu", exact=True, ranks=ranks, stages=stages)
    write_adapter(file, one, targets=TARGETS, more=("output.weight",), quantized=quantized)
    ids = tokens()[:9]
    plain = one.session(F32).eval_rows(ids)
    for model in (one, many):
        model.use_adapters({"a": file}, [0.5])
    wanted, found = (model.session(F32).eval_rows(ids) for model in (one, many))
    assert np.linalg.norm(wanted - plain) > 1e-2 * np.linalg.norm(plain)
    assert np.linalg.norm(found - wanted) < 3e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize("at", ["attn_q.weight.lora_b", "ffn_down.weight.lora_a"])
def test_a_rank_reads_its_part_alone(tmp_path: Path, at: str) -> None:
    """What the second rank has of it is no number, which it alone says."""
    path, file = write_model(tmp_path / "m.gguf", "llama"), tmp_path / "a.gguf"
    write_adapter(file, load(path, "cpu", exact=True), targets=TARGETS)
    with GGUFFile.open(file) as adapter:
        info = adapter.tensors[f"blk.1.{at}"]
    data = bytearray(file.read_bytes())
    data[info.offset + info.nbytes - 4 : info.offset + info.nbytes] = np.float32(np.nan).tobytes()
    file.write_bytes(data)
    first, second = (load(path, "cpu", exact=True, ranks=Alone(rank, 2)) for rank in range(2))
    first.use_adapters({"a": file})
    stage = load(path, "cpu", exact=True, ranks=Alone(0, 2, stages=2))
    stage.use_adapters({"a": file})
    assert first.decoder.adapters is not None and stage.decoder.adapters is not None
    assert first.decoder.adapters.fingerprint == stage.decoder.adapters.fingerprint, "of the whole file"
    with pytest.raises(SessionError, match="must have numbers"):
        second.use_adapters({"a": file})


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    """By the whole matrix's shape, whatever part a rank has."""
    other, file = load(write_model(tmp_path / "o.gguf", "gemma3"), "cpu", exact=True), tmp_path / "a.gguf"
    write_adapter(file, other, targets=("attn_q",), keys={"general.architecture": "llama"})
    model = load(write_model(tmp_path / "m.gguf", "llama"), "cpu", exact=True, ranks=2)
    with pytest.raises(SessionError, match=r"must have sides of the shapes \[64, rank\] and \[rank, 64\]"):
        model.use_adapters({"a": file})
