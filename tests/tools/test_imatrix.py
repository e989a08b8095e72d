"""Importance matrices: sums against a computation by hand, llama.cpp's format, and what quantizing makes of them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from support import gguf_files, tiny, tiny_archs  # noqa: F401 (its models are found by name)
from support.tiny import write_model
from support.verbs import Verb

from graphrt.dtypes import TYPES
from graphrt.errors import GGUFError
from graphrt.models import load
from graphrt.models.engine import SessionOptions
from graphrt.models.gguf import GGUFFile, TensorInfo
from graphrt.models.quantize import imatrix
from graphrt.models.quantize.mixtures import Request, file_type
from graphrt.models.quantize.run import plan, write
from graphrt.models.quantize.tap import Tap

TOKENS = tiny.tokens(40)


@pytest.fixture
def graphrt(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb(capsys)


def tapped(path: Path, n_batch: int = 16, **how: bool) -> Tap:
    model = load(path, "cpu", exact=True)
    tap = Tap(model.decoder, model.backends, SessionOptions(64, n_batch, "f32", "f32"), **how)
    tap.collect(TOKENS)
    tap.collect(TOKENS[:5])
    return tap


def test_sums_are_those_of_a_computation_by_hand(tmp_path: Path) -> None:
    """The first layer's attention reads the normed embedding, which follows from weights and tokens alone."""
    path = write_model(tmp_path / "m.gguf", "llama")
    entry = tapped(path).entries["blk.0.attn_q.weight"]
    with GGUFFile.open(path) as file:
        table = file.dequantize("token_embd.weight").astype(np.float64)
        scale = file.dequantize("blk.0.attn_norm.weight").astype(np.float64)
    x = table[[*TOKENS, *TOKENS[:5]]]
    normed = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * scale
    assert np.allclose(entry.sums[0], np.square(normed).sum(0), rtol=1e-5)
    assert entry.counts.tolist() == [45.0]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3moe", "deepseek2", "gpt-oss"])
def test_every_product_of_a_layer_has_its_sums(name: str, tmp_path: Path) -> None:
    """Of all matrices of a model, with every token counted, whatever the batches."""
    path = write_model(tmp_path / "m.gguf", name)
    tap, whole = tapped(path, with_output=True), tapped(path, 64, with_output=True)
    with GGUFFile.open(path) as file:
        matrices = {n: t for n, t in file.tensors.items() if len(t.ne) > 1 and n.endswith(".weight")}
    tables = {"position_embd.weight"} | ({"token_embd.weight"} if "output.weight" in matrices else set())
    assert set(tap.entries) == set(matrices) - tables
    used = {"qwen3moe": 2, "gpt-oss": 2, "deepseek2": 2}.get(name, 0)
    for weight, entry in tap.entries.items():
        ne = matrices[weight].ne
        assert entry.sums.shape == (int(np.prod(ne[2:])), ne[0]), weight
        assert np.allclose(entry.sums, whole.entries[weight].sums, rtol=1e-4), weight
        seen = entry.counts.sum()
        assert seen % 45 == 0 if "_exps." in weight else seen == 45, weight
    if used:
        router = next(e for n, e in tap.entries.items() if "ffn_gate_inp" in n)
        layer = next(n for n in tap.entries if "ffn_gate_inp" in n).split(".")[1]
        experts = next(e for n, e in tap.entries.items() if n.startswith(f"blk.{layer}.ffn_gate") and "_exps" in n)
        n_used = experts.counts.sum() / 45
        assert np.allclose(experts.sums.sum(0), n_used * router.sums[0], rtol=1e-5), "they read what the router reads"


def test_the_file_is_llama_cpps(graphrt: Verb, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "qwen3moe", tokenizer="spm")
    text = tmp_path / "text.txt"
    text.write_text("hello the sea, he sees the sea in the rain. " * 6)
    out = tmp_path / "i.gguf"
    found = graphrt("imatrix", path, "-f", text, "-o", out, "-c", "32", "--chunks", "2", "--json").json()
    assert (found["chunks"], found["chunk_size"]) == (2, 32)
    reader = gguf.GGUFReader(out)
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert values == {
        "general.type": "imatrix", "imatrix.datasets": [str(text)], "imatrix.chunk_count": 2, "imatrix.chunk_size": 32,
    }  # fmt: skip
    shapes = {t.name: (t.tensor_type.name, t.shape.tolist()) for t in reader.tensors}
    assert shapes["blk.0.attn_q.weight.in_sum2"] == ("F32", [64, 1])
    assert shapes["blk.0.attn_q.weight.counts"] == ("F32", [1, 1])
    experts = shapes["blk.0.ffn_up_exps.weight.in_sum2"][1]
    assert shapes["blk.0.ffn_up_exps.weight.counts"] == ("F32", [1, experts[1]])
    assert len(shapes) == 2 * found["weights"] and not any(name.startswith(("output", "token")) for name in shapes)
    importance = imatrix.load(out)
    counts = {t.name: t.data for t in reader.tensors}["blk.0.attn_q.weight.counts"]
    sums = {t.name: t.data for t in reader.tensors}["blk.0.attn_q.weight.in_sum2"]
    assert counts.item() == 64 and np.allclose(importance.rows["blk.0.attn_q.weight"], sums / 64)


def test_quantizing_with_importances_spares_what_inputs_are_large(graphrt: Verb, tmp_path: Path) -> None:
    """The error of a product's result, on the inputs that were seen, is smaller than without."""
    path = write_model(tmp_path / "m.gguf", "phi3-wide", tokenizer="spm")
    (tmp_path / "t.txt").write_text("hello the sea, he sees the sea in the rain. " * 6)
    graphrt("imatrix", path, "-f", tmp_path / "t.txt", "-o", tmp_path / "i.gguf", "-c", "32")
    plain, weighed = tmp_path / "plain.gguf", tmp_path / "weighed.gguf"
    assert graphrt("quantize", path, plain, "Q4_K_S").code == 0
    result = graphrt("quantize", path, weighed, "Q4_K_S", "--imatrix", tmp_path / "i.gguf")
    assert result.code == 0 and "no importances for token_embd.weight, output.weight" in result.err
    importance = imatrix.load(tmp_path / "i.gguf")
    with GGUFFile.open(path) as old, GGUFFile.open(plain) as a, GGUFFile.open(weighed) as b:
        assert b.metadata["quantize.imatrix.chunks_count"] == importance.n_chunks > 0
        assert b.metadata["quantize.imatrix.dataset"] == str(tmp_path / "t.txt")
        for name, rows in importance.rows.items():
            wanted = old.dequantize(name).astype(np.float64)
            lost = [float((np.square(f.dequantize(name) - wanted) * rows[0]).sum()) for f in (a, b)]
            assert lost[1] < lost[0], name


def test_each_expert_has_its_own_importances(tmp_path: Path) -> None:
    n, n_mat = 32, 3
    data = np.random.default_rng(3).standard_normal((n_mat, 2, n)).astype(np.float32)
    source = gguf_files.write_gguf(
        tmp_path / "m.gguf",
        [
            ("general.architecture", "string", "llama"),
            ("llama.expert_count", "u32", 3),
            ("llama.block_count", "u32", 1),
        ],
        [("blk.0.ffn_up_exps.weight", "f32", (n, 2, n_mat), data.tobytes())],
    )
    importance = np.ones((n_mat, n))
    for expert in range(n_mat):
        importance[expert, expert] = 1e4
    entry = imatrix.Entry(importance, np.array([1.0, 1.0, 1.0]))
    imatrix.save(tmp_path / "i.gguf", {"blk.0.ffn_up_exps.weight": entry}, n_chunks=1, chunk_size=8)
    found = imatrix.load(tmp_path / "i.gguf")
    with GGUFFile.open(source) as file:
        request = Request(file_type("Q4_0"), has_importance=True)
        write(file, plan(file, request, importance=found), tmp_path / "q.gguf", importance=found)
    with GGUFFile.open(tmp_path / "q.gguf") as new:
        lost = np.abs(new.dequantize("blk.0.ffn_up_exps.weight") - data)
    for expert in range(n_mat):
        assert lost[expert, :, expert].max() < 0.02 < lost[expert].max(), "each where its own are large"


def test_experts_that_nothing_reached_count_alike(tmp_path: Path) -> None:
    sums = np.array([[4.0, 8.0], [0.0, 0.0]])
    entry = imatrix.Entry(sums, np.array([2.0, 0.0]))
    imatrix.save(tmp_path / "i.gguf", {"w": entry}, n_chunks=1, chunk_size=8)
    assert imatrix.load(tmp_path / "i.gguf").rows["w"].tolist() == [[2, 4], [1, 1]]


def test_what_is_refused(graphrt: Verb, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", tokenizer="spm")
    with pytest.raises(GGUFError, match=r"must have the general\.type imatrix"):
        imatrix.load(path)
    one = imatrix.Entry(np.ones((1, 8)), np.ones(1))
    imatrix.save(tmp_path / "i.gguf", {"blk.0.ffn_up.weight": one}, n_chunks=1, chunk_size=8)
    result = graphrt("quantize", path, tmp_path / "q.gguf", "Q4_0", "--imatrix", tmp_path / "i.gguf")
    assert result.code == 2 and "needs importances of 1 x 64 inputs, got 1 x 8" in result.err
    bad = imatrix.Entry(np.full((1, 8), np.inf), np.ones(1))
    imatrix.save(tmp_path / "bad.gguf", {"w": bad}, n_chunks=1, chunk_size=8)
    with pytest.raises(GGUFError, match="must be finite"):
        imatrix.load(tmp_path / "bad.gguf")
    (tmp_path / "t.txt").write_text("hello")
    result = graphrt("imatrix", path, "-f", tmp_path / "t.txt", "-o", tmp_path / "o.gguf", "-c", "32")
    assert result.code == 2 and "at least one chunk" in result.err and not (tmp_path / "o.gguf").exists()
    info = TensorInfo("token_embd.weight", TYPES["f32"], (64, 9), 0, 0)
    assert imatrix.load(tmp_path / "i.gguf").of(info) is None
