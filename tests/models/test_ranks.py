"""Models cut over ranks: all families played in one process, several processes over gloo, plans and refusals."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from support import ranked, tiny
from support.ranked import F32, WIDTHS, logits_of, parts
from support.tiny import tokens, write_model
from support.tiny_archs import DECODERS, Tiny
from torch.multiprocessing.spawn import start_processes

from graphrt import Graph, new_input, ops, prepare
from graphrt.errors import ArchError, GraphError, RankError, SessionError
from graphrt.models import load
from graphrt.models.gguf import GGUFFile
from graphrt.models.model import Model
from graphrt.models.ranks.plan import RankPlan
from graphrt.models.ranks.share import Share, alibi_runs
from graphrt.models.ranks.spans import heads_of
from graphrt.models.ranks.weights import cut_bytes
from graphrt.ops.collectives import COLLECTIVES
from graphrt.ops.linked import linked
from graphrt.ops.soft_max import alibi_slopes

#: Relative to one rank's logits, by their norm: sums over ranks are taken in another order, nothing else differs. Each
#: of a step's few hundred roundings in a row is of 2**-24 at most; a wrong cut is off by 1e-2 and more.
CLOSE = 3e-6
#: Rows of whole super-blocks, two and more of each sum.
WIDE = Tiny("llama", n=512, heads=(4, 2), ff=768, layers=1)
#: A family each, and what sets variants apart; those of 64 layers are as command-r.
FAMILIES = [name for name in ("llama", "gemma3", *DECODERS) if name not in ("command-r-plus", "deepseek2-lite")]


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    return float(np.linalg.norm(found - wanted)) < CLOSE * float(np.linalg.norm(wanted))


def model_of(path: Path, name: str, ranks: int = 1, *, exact: bool = True) -> Model:
    return load(write_model(path / "m.gguf", *name.split()), "cpu", exact=exact, ranks=ranks)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny.OTHERS, "llama-512", WIDE.model)


# ---- played in one process


def check_played(path: Path, name: str, ranks: int) -> None:
    one, many = (model_of(path, name, n, exact=True) for n in (1, ranks))
    ids = tokens()
    wanted, found = (model.session(F32) for model in (one, many))
    assert close(found.eval_rows(ids[:9]), wanted.eval_rows(ids[:9]))
    for token in ids[9:11]:
        assert close(found.eval([token]), wanted.eval([token]))


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_say_what_one_does(tmp_path: Path, name: str) -> None:
    check_played(tmp_path, name, 2)


@pytest.mark.parametrize("name", ["gemma2 Q4_0", "llama-moe Q4_0", "gpt-oss MXFP4", "llama-512 Q4_K", "llama-512 Q6_K"])
def test_two_ranks_have_whole_blocks_of_quantized_weights(tmp_path: Path, name: str) -> None:
    check_played(tmp_path, name, 2)


@pytest.mark.parametrize("name", ["llama", "qwen2-fused", "deepseek2", "mpt", "falcon", "olmo2", "phi3"])
def test_four_ranks_share_heads_of_k(tmp_path: Path, name: str) -> None:
    """Of two heads of k, or one: each rank has a copy of the one that its heads of q read."""
    check_played(tmp_path, name, 4)


def test_all_heads_together_are_normed_over_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Tiny(
        "mpt", rms=False, fused=True, gate="none", heads=(4, 4),
        extra={"attn_q_norm": (64,), "attn_k_norm": (64,)}, bias=("attn_q_norm",),
    )  # fmt: skip
    monkeypatch.setitem(tiny.OTHERS, "mpt-norms", row.model)
    check_played(tmp_path, "mpt-norms", 2)


def test_sequences_side_by_side_and_a_native_step(tmp_path: Path) -> None:
    one, many = (model_of(tmp_path, "llama", n, exact=False) for n in (1, 2))
    rows = np.array(tokens()[:24], np.int32).reshape(2, 12)
    wanted, found = (model.engine(2, F32).read(dict(enumerate(rows))) for model in (one, many))
    assert close(found, wanted)
    told = []
    for model in (one, many):
        session = model.session(F32)
        told.append(list(session.likeliest(int(session.eval(tokens()[:5]).argmax()), 8)))
    assert told[0] == told[1] and len(told[0]) == 8


def test_ranks_have_their_own_caches_and_meet_twice_a_layer(tmp_path: Path) -> None:
    model = model_of(tmp_path, "llama", 2)
    graph = model.session(F32).executable(1, 1).graph
    met = [node.name for node in graph.nodes if node.op in COLLECTIVES]
    assert met == [f"{part}_joined-{il}" for il in (0, 1) for part in ("attn", "ffn")] + ["result_output"]
    caches = [leaf for leaf in graph.leafs if leaf.name.startswith("cache_k")]
    assert [leaf.ne[0] for leaf in caches] == [16] * 4 and len({id(leaf.buffer) for leaf in caches}) == 4
    names = {node.name for node in graph.nodes}
    assert {"Qcur_rope-1", "Qcur_rope-1@1", "__fattn__-0@1"} <= names and "result_output@1" not in names


def test_what_can_not_be_played_is_refused(tmp_path: Path) -> None:
    a = new_input("f32", 4, name="a")
    alone, other = Graph(ops.sqr(a)), Graph(ops.all_reduce(a, ranks=2, rank=0))
    with pytest.raises(GraphError, match="at as many collectives, these graphs have \\[0, 1\\]"):
        linked([alone, other])
    with pytest.raises(GraphError, match="one graph plays 2 to 8 ranks in stages of as many, got 1 in 1"):
        linked([other])
    three = Graph(ops.all_reduce(new_input("f32", 4, name="a"), ranks=3, rank=1))
    with pytest.raises(GraphError, match="at one collective of 2 ranks, got .* of 2, .* of 3"):
        linked([other, three])
    with pytest.raises(SessionError, match="rings of cells, not pages"):
        model_of(tmp_path, "llama", 2).engine(2, replace(F32, page=16)).read({0: [1]})


def test_a_rank_by_itself_needs_a_group() -> None:
    a = new_input("f32", 4, name="a")
    exe = prepare(Graph(ops.all_reduce(a, ranks=2, rank=0)), "cpu")
    exe.write(a, np.zeros(4, np.float32))
    with pytest.raises(RankError, match="that 2 ranks meet at needs a process group.*--tp or torchrun"):
        exe.run()


def test_what_a_step_chooses_is_the_first_rank_s() -> None:
    shares = [Share(2, rank, (), (), {}) for rank in range(2)]
    logits = [new_input("f32", 5, 3, name=f"logits {rank}") for rank in range(2)]
    graphs = [Graph(share.agreed(ops.argmax(x))) for share, x in zip(shares, logits)]
    exe = prepare(linked(graphs), "cpu")
    values = np.random.Generator(np.random.Philox(key=1)).standard_normal((2, 3, 5), np.float32)
    exe.write_all(dict(zip(logits, values)))
    exe.run()
    assert values[0].argmax(-1).tolist() != values[1].argmax(-1).tolist()
    for chosen in exe.graph.outputs:
        assert exe.read(chosen).reshape(-1).tolist() == values[0].argmax(-1).tolist()


# ---- the plan


def plan_of(path: Path, name: str, ranks: int) -> tuple[GGUFFile, RankPlan]:
    from graphrt.models.arch import architecture, read_file
    from graphrt.models.ranks.network import plan_of

    file = GGUFFile.open(write_model(path / "m.gguf", *name.split()))
    hp = read_file(file)
    return file, plan_of(architecture(hp.arch), hp, file, ranks)[0]


@pytest.mark.parametrize("name", ["llama", "qwen2-fused", "phi3", "deepseek2-merged", "gpt-oss MXFP4", "command-r"])
def test_every_byte_is_somebodys(tmp_path: Path, name: str) -> None:
    """What is cut is cut into parts that make up the whole; what is added once is zero elsewhere."""
    file, plan = plan_of(tmp_path, name, 2)
    for tensor, info in file.tensors.items():
        cut, data = plan.cuts[tensor], file.data(tensor)
        mine = [cut_bytes(data, info, cut, rank) for rank in range(2)]
        if cut.by == "whole":
            assert not cut.spans and all(np.array_equal(part, data) for part in mine)
        elif cut.by == "rank 0":
            assert np.array_equal(mine[0], data) and not mine[1].any()
        else:
            assert sum(part.size for part in mine) == data.size
            assert np.array_equal(np.sort(np.concatenate(mine)), np.sort(data)), tensor
            full = sorted(span for spans in cut.spans for span in spans)
            assert [a for a, _ in full[1:]] == [b for _, b in full[:-1]] and full[0][0] == 0
            assert full[-1][1] == info.ne[cut.dim]


def test_rows_are_read_where_the_file_is_mapped(tmp_path: Path) -> None:
    file, plan = plan_of(tmp_path, "llama", 2)
    for name, shared in (("blk.0.attn_q.weight", True), ("blk.0.ffn_down.weight", False)):
        data = file.data(name)
        part = cut_bytes(data, file.tensors[name], plan.cuts[name], 1)
        assert np.shares_memory(part, data) is shared and part.size == data.size // 2


@pytest.mark.parametrize(
    ("name", "ranks", "rule"),
    [
        ("gemma", 4, "each of 4 ranks must have heads of .* layer 0 has 3 heads of q, and 1 of k and v; use 3$"),
        ("bloom", 4, "each of 4 ranks must have heads of .* 3 heads of q, and 3 of k and v; use 3$"),
        ("mpt Q8_0", 2, "6 heads of q, 2 of which the type of attn_output keeps .* and 2 of k and v; use 1"),
        ("llama-512 Q4_K", 4, "4 heads of q, 2 of which the type of attn_output keeps together.* use 2"),
        ("llama", 3, "4 heads of q, and 2 of k and v; use 2 or 4"),
        ("deepseek2-merged Q8_0", 2, "an expert's columns, there are 32 in blocks of 32, which a quantized type keeps"),
        ("llama", 65, "cut for 2 to 64 ranks, got 65"),
    ],
)
def test_what_can_not_be_cut_is_refused(tmp_path: Path, name: str, ranks: int, rule: str) -> None:
    with pytest.raises(ArchError, match=rule):
        plan_of(tmp_path, name, ranks)


def test_heads_are_shared_out_or_numbers_that_do_are_named() -> None:
    """All small numbers of heads: each rank has some of q, whole as attn_output's blocks are, and those of k and v that
    they read."""
    sizes = [(group * n_kv, n_kv) for n_kv in range(1, 7) for group in range(1, 7)]
    for (n_head, n_kv), step, ranks in product(sizes, (1, 2, 4), range(2, 13)):
        try:
            heads, kv = heads_of(0, n_head, n_kv, ranks, step)
        except ArchError as error:
            for near in str(error).rpartition("use ")[2].split(" or "):
                assert near == "1" or heads_of(0, n_head, n_kv, int(near), step)
            continue
        assert [a for a, _ in heads] == [0, *(b for _, b in heads[:-1])] and heads[-1][1] == n_head
        group = n_head // n_kv
        for (a, b), (first, stop) in zip(heads, kv, strict=True):
            assert a < b and (a // group, (b - 1) // group + 1) == (first, stop)
            assert a % step == 0 and (b % step == 0 or b == n_head)
            assert (b - a) % (stop - first) == 0, "heads of q must be evenly many for each of k"


def test_encoders_and_unknown_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchError, match="only decoders are cut over ranks, bert models are encoders"):
        plan_of(tmp_path, "bert", 2)
    with pytest.raises(ArchError, match="'blk.0.attn_rel_b.weight' has no rule how it is cut"):
        from graphrt.models.ranks.plan import plan_ranks

        file, plan = plan_of(tmp_path, "llama", 2)
        other = {"blk.0.attn_rel_b.weight": file.tensors["blk.0.attn_q.weight"]}
        plan_ranks(plan.hp, tiny_layout(), {**file.tensors, **other}, 2)


def tiny_layout() -> object:
    from graphrt.models.arch.llama import Llama

    return Llama.layout


@pytest.mark.parametrize(("n_head", "group"), [(8, 1), (6, 3), (3, 1), (12, 4), (1, 1)])
def test_heads_keep_the_slopes_they_have_among_all(n_head: int, group: int) -> None:
    whole = alibi_slopes(n_head, 8.0)
    for first in range(n_head):
        for stop in range(first + 1, n_head + 1):
            if first % group == 0 and (stop - first) % group == 0:
                runs = alibi_runs(n_head, (first, stop), 8.0, group)
                found = [s for run in runs for s in alibi_slopes(run.n, run.max_bias)]
                assert found == pytest.approx(whole[first:stop], rel=1e-12)
                assert all(r.first % group + r.n <= group or r.first % group == r.n % group == 0 for r in runs)
    assert len(alibi_runs(8, (0, 4), 8.0, 1)) == 1


# ---- several processes


def run_ranks(folder: Path, size: int, paths: list[Path]) -> list[dict[str, np.ndarray]]:
    """What each of `size` processes found."""
    folder.mkdir()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    given = (size, str(folder), [str(path) for path in paths])
    context = start_processes(ranked.rank, given, size, join=False, start_method="spawn")
    assert context is not None
    while not context.join():
        pass
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(size)]


def check_processes(folder: Path, size: int, paths: list[Path]) -> list[dict[str, np.ndarray]]:
    """All ranks have the same bits, those of ranks that are played, and are close to one."""
    found = run_ranks(folder, size, paths)
    for i, path in enumerate(paths):
        for exact in ranked.forms(path):
            mine = found[0][f"{i} {exact}"]
            assert all(np.array_equal(mine, other[f"{i} {exact}"]) for other in found), path.stem
            assert np.array_equal(mine, logits_of(load(path, "cpu", exact=exact, ranks=size))), path.stem
        assert close(found[0][f"{i} True"], logits_of(load(path, "cpu", exact=True)))
    for n in WIDTHS:
        wanted = torch.zeros(3, n)
        for part in parts(n, size):
            wanted = wanted + part
        assert all(np.array_equal(other[f"sum {n}"], wanted.numpy()) for other in found)
    return found


def test_two_processes_have_the_bits_of_ranks_that_are_played(tmp_path: Path) -> None:
    """Also that tokens are decided once, though each rank has a seed of its own, and that files that differ are told
    apart before the first step."""
    paths = [write_model(tmp_path / f"{name}.gguf", name) for name in ("gpt-oss", "deepseek2")]
    paths.append(write_model(tmp_path / "llama-words.gguf", "llama", tokenizer="spm"))
    found = check_processes(tmp_path / "two", 2, paths)
    for exact in (True, False):
        told = [of[f"2 {exact} tokens"] for of in found]
        assert np.array_equal(*told)
    whole = {t.name: t.nbytes for t in load(paths[2], "cpu").weights.loaded.values()}
    assert found[0]["2 weights"].sum() < 0.75 * sum(whole.values())
    for of in found:
        assert "all ranks must have one file, their keys differ: rank 0 has" in str(of["refused"])


def test_four_processes(tmp_path: Path) -> None:
    check_processes(tmp_path / "four", 4, [write_model(tmp_path / "llama.gguf", "llama")])
