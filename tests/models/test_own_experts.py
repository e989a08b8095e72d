"""Experts shared out whole over ranks: mixtures played in one process, the plan, what is refused. Processes are in
test_stages.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.ranked import F32
from support.tiny import tokens, write_model
from support.tiny_archs import DECODERS

from graphrt.errors import ArchError
from graphrt.models import load
from graphrt.models.arch import architecture, read_file
from graphrt.models.engine import SessionOptions
from graphrt.models.gguf import GGUFFile
from graphrt.models.ranks.network import plan_of
from graphrt.models.ranks.report import rank_needs
from graphrt.models.ranks.weights import cut_bytes

#: As in test_ranks.py; where activations are rounded, what one rank's rounding leaves, several times over.
CLOSE, ROUNDED = 3e-6, 3e-4
MIXTURES = [name for name, row in DECODERS.items() if row.experts and name not in ("qwen3moe-width", "deepseek2-lite")]


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize(
    ("name", "ranks", "exact"),
    [*((name, 2, True) for name in MIXTURES), ("qwen3moe", 3, True), ("deepseek2-merged", 3, True),
     ("gpt-oss MXFP4", 2, True), ("llama-moe Q4_0", 2, False), ("gpt-oss", 2, False)],
)  # fmt: skip
def test_ranks_say_what_one_does(tmp_path: Path, name: str, ranks: int, exact: bool) -> None:
    path = write_model(tmp_path / "m.gguf", *name.split())
    wanted = load(path, "cpu", exact=exact).session(F32)
    found = load(path, "cpu", exact=exact, ranks=ranks, ep=True).session(F32)
    ids, most = tokens(), CLOSE if exact or " " not in name else ROUNDED
    assert distance(found.eval_rows(ids[:9]), wanted.eval_rows(ids[:9])) < most
    for token in ids[9:11]:
        assert distance(found.eval([token]), wanted.eval([token])) < most


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek2-merged", "llama-moe Q4_0"])
def test_every_expert_is_one_rank_s(tmp_path: Path, name: str) -> None:
    """With its biases; the router and what every token is given are as without."""
    file = GGUFFile.open(write_model(tmp_path / "m.gguf", *name.split()))
    hp = read_file(file)
    plan, _ = plan_of(architecture(hp.arch), hp, file, 2, 1, ep=True)
    seen = 0
    for tensor, info in file.tensors.items():
        if "_exps." not in tensor:
            continue
        cut, data = plan.cuts[tensor], file.data(tensor)
        mine = [cut_bytes(data, info, cut, rank) for rank in range(2)]
        assert cut.by == "experts" and np.array_equal(np.concatenate(mine), data)
        assert all(np.shares_memory(part, data) for part in mine)  # read where the file is mapped
        seen += 1
    assert seen and hp.experts is not None
    held = [plan.hparams(rank).experts for rank in range(2)]
    assert sum(each.held for each in held if each is not None) == hp.experts.n
    needs, cuts = rank_needs(file, 2, SessionOptions(64), ep=True)
    assert any(cut.by == "experts" for cut in cuts) and len(needs) == 2


def test_blocks_of_a_type_are_no_matter(tmp_path: Path) -> None:
    """Of 32 columns in blocks of 32 no two ranks can have a part; of 3 experts they can."""
    path = write_model(tmp_path / "m.gguf", "qwen3moe-width", "Q8_0")
    with pytest.raises(ArchError, match="an expert's columns, there are 32 in blocks of 32"):
        load(path, "cpu", exact=True, ranks=2)
    ids = tokens()[:9]
    wanted, found = load(path, "cpu", exact=True), load(path, "cpu", exact=True, ranks=2, ep=True)
    assert distance(found.session(F32).eval_rows(ids), wanted.session(F32).eval_rows(ids)) < CLOSE


@pytest.mark.parametrize(
    ("name", "ranks", "stages", "rule"),
    [
        ("llama", 2, 1, "experts are shared out over the ranks of a stage, this model has none; leave --ep out"),
        ("llama-moe", 2, 2, "experts are shared out over the ranks of a stage, each stage has one; leave --ep out"),
        ("llama-moe-one", 4, 1, "each of 4 ranks must have a part of the experts, there are 3"),
    ],
)
def test_what_can_not_be_shared_out_is_refused(tmp_path: Path, name: str, ranks: int, stages: int, rule: str) -> None:
    path = write_model(tmp_path / "m.gguf", name)
    with pytest.raises(ArchError, match=rule):
        load(path, "cpu", ranks=ranks, stages=stages, ep=True)
