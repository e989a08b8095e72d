"""Pipelines: layers shared out over stages, played in one process, and several processes over gloo."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import ranked
from support import tiny_archs as tiny_archs
from support.ranked import F32, logits_of, ragged
from support.tiny import tokens, write_model
from torch.multiprocessing.spawn import start_processes

from graphrt import Graph, new_input, ops, prepare
from graphrt.errors import ArchError, GraphError
from graphrt.models import load
from graphrt.models.engine import Engine, SessionOptions
from graphrt.models.gguf import GGUFFile
from graphrt.models.model import Model
from graphrt.models.ranks.played import PlayedDecoder
from graphrt.models.ranks.report import rank_needs
from graphrt.models.ranks.stages import owners, stages_of
from graphrt.models.step import PreparedStep, StepInputs
from graphrt.ops.linked import linked
from graphrt.ops.send_recv import link_bytes, on_link

#: Those whose layers, ends or masks are of different kinds; a pipeline sees nothing else of a family.
FAMILIES = ["llama", "gemma3", "gpt-oss", "deepseek2", "mpt", "bloom", "falcon", "qwen2-tied"]


def model_of(path: Path, name: str, ranks: int = 1, stages: int = 1) -> Model:
    return load(write_model(path / "m.gguf", *name.split()), "cpu", exact=True, ranks=ranks, stages=stages)


# ---- played in one process


@pytest.mark.parametrize("name", FAMILIES)
def test_two_stages_say_what_one_does(tmp_path: Path, name: str) -> None:
    """To the bit: no sum is another one."""
    wanted, found = (model_of(tmp_path, name, n, n).session(F32) for n in (1, 2))
    ids = tokens()
    assert np.array_equal(found.eval_rows(ids[:9]), wanted.eval_rows(ids[:9]))
    for token in ids[9:11]:
        assert np.array_equal(found.eval([token]), wanted.eval([token]))


@pytest.mark.parametrize(("name", "ranks"), [("llama", 4), ("gpt-oss", 4), ("deepseek2", 4), ("mpt", 4)])
def test_stages_of_several_ranks(tmp_path: Path, name: str, ranks: int) -> None:
    """Two of two ranks have the bits of two ranks."""
    wanted, found = (model_of(tmp_path, name, n, stages) for n, stages in ((ranks // 2, 1), (ranks, 2)))
    ids = tokens()[:9]
    assert np.array_equal(found.session(F32).eval_rows(ids), wanted.session(F32).eval_rows(ids))


def test_what_crosses_and_where(tmp_path: Path) -> None:
    graph = model_of(tmp_path, "llama", 4, 2).session(F32).executable(1, 1).graph
    told = [(node.op, node.name, node.params.rank, node.params.other) for node in graph.nodes if node.op == "RECV"]
    assert {(name, rank, other) for _, name, rank, other in told} >= {("l_in-1@2", 2, 0), ("result_output", 0, 2)}
    assert len([leaf for leaf in graph.leafs if leaf.name.startswith("cache_k")]) == 4
    assert not any(on_link(node) for node in graph.nodes)


# ---- the ops


def stage(rank: int, *, waits: bool = False) -> Graph:
    """2 x and then 3 there; back comes their difference. waits: for a third thing."""
    x = new_input("f32", 4, name="x")
    if rank == 0:
        sent = ops.send(ops.scale(ops.send(ops.add(x, x), rank=0, other=1), 1.5), rank=0, other=1)
        return Graph(ops.recv(sent, rank=0, other=1, type="f32", ne=(4,), name="out"))
    first = ops.recv(x, rank=1, other=0, type="f32", ne=(4,))
    taken = ops.recv(first, rank=1, other=0, type="f32", ne=(4,))
    if waits:
        taken = ops.recv(taken, rank=1, other=0, type="f32", ne=(4,))
    return Graph(ops.send(ops.sub(taken, first), rank=1, other=0))


def test_a_rank_has_what_another_one_sends() -> None:
    exe = prepare(linked([stage(0), stage(1)], stages=2), "cpu")
    exe.write("x", np.arange(4, dtype=np.float32))
    exe.run()
    assert exe.read("out").reshape(-1).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_what_nobody_sends_is_not_waited_for() -> None:
    with pytest.raises(GraphError, match=r"must have been sent, these wait for ever, by rank: \{0: 'out', 1:"):
        linked([stage(0), stage(1, waits=True)], stages=2)
    with pytest.raises(GraphError, match="2 to 8 ranks in stages of as many, got 2 in 3"):
        linked([stage(0), stage(1)], stages=3)


def test_bytes_on_the_link() -> None:
    a = new_input("f16", 8, 3, name="a")
    sent = ops.send(a, rank=0, other=1)
    taken = ops.recv(a, rank=0, other=1, type="f32", ne=(5,))
    assert [link_bytes(sent), link_bytes(taken)] == [48, 20] and on_link(sent) and on_link(taken)
    assert not on_link(ops.send(a, rank=0, other=1, played=True))


# ---- which layers


def file_of(layers: list[int], ends: dict[str, int]) -> Any:
    """Tensors of so many bytes."""
    sizes = {f"blk.{il}.ffn_up.weight": n for il, n in enumerate(layers)} | ends
    return {name: SimpleNamespace(nbytes=n) for name, n in sizes.items()}


@pytest.mark.parametrize(
    ("layers", "ends", "wanted"),
    [
        ([1, 1, 1, 1], {"token_embd.weight": 1, "output.weight": 1}, [(0, 2), (2, 4)]),
        ([1] * 6, {"token_embd.weight": 4, "output.weight": 1}, [(0, 2), (2, 6)]),
        ([1] * 6, {"token_embd.weight": 4}, [(0, 3), (3, 6)]),  # whose other end has it too
        ([9, 1, 1, 1, 1], {"output.weight": 1, "token_embd.weight": 0}, [(0, 1), (1, 3), (3, 5)]),
        ([1, 1, 9], {"output.weight": 0, "token_embd.weight": 0}, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_the_fullest_stage_is_as_small_as_can_be(layers: list[int], ends: dict[str, int], wanted: list[Any]) -> None:
    found = stages_of(file_of(layers, ends), len(layers), len(wanted))
    costs = [*layers]
    costs[0] += ends["token_embd.weight"]
    costs[-1] += ends.get("output.weight", ends["token_embd.weight"])
    assert max(sum(costs[a:b]) for a, b in found) == max(sum(costs[a:b]) for a, b in wanted)
    assert [a for a, _ in found[1:]] == [b for _, b in found[:-1]] and all(a < b for a, b in found)
    assert (found[0][0], found[-1][1], len(found)) == (0, len(layers), len(wanted))


def test_tensors_outside_of_layers() -> None:
    layers = [(0, 2), (2, 5), (5, 6)]
    asked = ("token_embd.weight", "output.bias", "output_norm.weight", "rope_freqs.weight", "blk.4.attn_q.weight")
    assert [list(owners(name, layers)) for name in asked] == [[0], [2], [2], [0, 1, 2], [1]]


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchError, match="each of 3 stages of a pipeline must have a layer, the model has 2"):
        model_of(tmp_path, "llama", 3, 3)
    with pytest.raises(ArchError, match="stages must have as many ranks each, got 4 ranks in 3"):
        model_of(tmp_path, "llama", 4, 3)


def test_every_byte_is_one_stage_s(tmp_path: Path) -> None:
    """But for a tied embedding and what all need; caches are of a stage's own layers."""
    file = GGUFFile.open(write_model(tmp_path / "m.gguf", "qwen2-tied"))
    needs, _ = rank_needs(file, 2, SessionOptions(64), 2)
    both = file.tensors["token_embd.weight"].nbytes
    assert sum(each.weights for each in needs) == sum(t.nbytes for t in file.tensors.values()) + both
    assert [(each.stage, each.first, each.layers) for each in needs] == [(0, 0, 1), (1, 1, 1)]
    n_embd, n_vocab = file.tensors["token_embd.weight"].ne
    assert [each.link for each in needs] == [4 * (n_embd + n_vocab)] * 2


@pytest.mark.parametrize(("stages", "n", "wanted"), [(1, 100, 512), (2, 100, 64), (2, 2048, 256), (4, 64 * 16, 64)])
def test_prompts_are_read_in_as_many_steps_as_stages_like(stages: int, n: int, wanted: int) -> None:
    engine: Any = SimpleNamespace(n_batch=512, decoder=SimpleNamespace(stages=stages))
    assert Engine.at_once(engine, n) == wanted


# ---- what goes back


def test_only_the_likeliest_token_goes_back(tmp_path: Path) -> None:
    """Of a step whose logits nobody keeps, with stages of one rank and of two."""
    for ranks in (2, 4):
        model = model_of(tmp_path, "llama", ranks, 2)
        decoder, session = model.decoder, model.session(F32)
        assert isinstance(decoder, PlayedDecoder)
        wanted = int(session.eval([3]).argmax())
        cache = model.session(F32).cache
        inputs = StepInputs.of(cache, new_input("i32", 1, name="inp_tokens"), 1, False)
        target, graphs, first = new_input("i32", 1, name="board"), [], 0
        for rank, hp in zip(decoder.ranks, decoder.cached):
            own = SimpleNamespace(
                layers=cache.layers[first : first + hp.n_layer], n_ctx=cache.n_ctx, n_seq=1, flash_attn=True, prec=0
            )
            first += hp.n_layer
            graphs.append(rank._choosing(replace(inputs, cache=own), target, None, keep_logits=False))  # type: ignore
        sent = [node for graph in graphs for node in graph.nodes if node.op == "RECV"]
        embedded, tokens = decoder.hp.n_embd, [node for node in sent if node.dtype.name == "i32"]
        assert [node.ne[0] for node in sent if node not in tokens] == [embedded] * (ranks // 2)
        assert [node.n_elements for node in tokens] == [1] * (ranks // 2)
        whole = linked(graphs, 2)
        step = PreparedStep(inputs, prepare(whole, "cpu"))
        step.write(np.zeros((1, 1), np.int64), np.array([3], np.int32), np.array([0], np.int32))
        step.exe.run()
        assert [int(step.exe.read(out).reshape(-1)[0]) for out in whole.outputs] == [wanted] * len(whole.outputs)


# ---- several processes


def check_processes(folder: Path, size: int, stages: int, paths: list[Path]) -> None:
    """All ranks have the same bits, those of one rank, or of as many as a stage has."""
    folder.mkdir()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    given = (size, str(folder), [str(path) for path in paths], stages)
    context = start_processes(ranked.rank, given, size, join=False, start_method="spawn")  # type: ignore[no-untyped-call]
    assert context is not None
    while not context.join():
        pass
    found = [dict(np.load(folder / f"{rank}.npz")) for rank in range(size)]
    for i, path in enumerate(paths):
        for exact in ranked.forms(path):
            mine = found[0][f"{i} {exact}"]
            assert all(np.array_equal(mine, other[f"{i} {exact}"]) for other in found), path.stem
            model = load(path, "cpu", exact=exact, ranks=size // stages, ep=ranked.whole_experts(path))
            assert np.array_equal(mine, logits_of(model)), path.stem
            texts = found[0][f"{i} {exact} ragged"]
            assert all(np.array_equal(texts, other[f"{i} {exact} ragged"]) for other in found), path.stem
            if size == stages:
                assert np.array_equal(texts, ragged(model)), path.stem
            if len(ranked.forms(path)) > 1:
                told = [of[f"{i} {exact} tokens"] for of in found]
                assert all(np.array_equal(told[0], other) for other in told)


def test_two_processes(tmp_path: Path) -> None:
    """Also that a stage has nothing of the other's layers, and that tokens are decided once."""
    paths = [write_model(tmp_path / f"{name}.gguf", name) for name in ("gpt-oss",)]
    paths.append(write_model(tmp_path / "llama-words.gguf", "llama", tokenizer="spm"))
    check_processes(tmp_path / "two", 2, 2, paths)


def test_four_processes_in_two_stages(tmp_path: Path) -> None:
    """One model's experts are shared out whole within a stage."""
    names = {"llama": "llama", "gpt-oss-ep": "gpt-oss"}
    check_processes(tmp_path / "four", 4, 2, [write_model(tmp_path / f"{f}.gguf", name) for f, name in names.items()])
