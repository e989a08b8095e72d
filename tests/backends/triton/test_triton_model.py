"""Whole models on the triton backend: one split, no fallbacks, the CPU's logits; exact, and fused with rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny import OTHERS, gemma3, llama, tokens, write_model

pytest.importorskip("triton")

from graphrt import get_backend
from graphrt.backend import Group
from graphrt.backends.triton import device
from graphrt.models import Model, load
from graphrt.models.choices import choices
from graphrt.models.engine import SessionOptions
from graphrt.models.sampling import Sampler, SamplerParams
from graphrt.models.session import Session
from graphrt.models.synthetic import synthetic
from graphrt.testing import nmse
from graphrt.tools.cli import main

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

F32 = SessionOptions(n_ctx=64, n_batch=16, type_k="f32", type_v="f32")
#: What a model's logits may be off the CPU's, as NMSE.
EXACT, ROUNDED = 1e-6, 1e-3


def one_layer() -> tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]:
    """tiny.py's llama with one layer, for the interpreter's sake, and heads of 32, which quantized caches need."""
    arch, keys, shapes = llama()
    keys |= {"block_count": 1, "attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": 32}
    shapes = {name: ne for name, ne in shapes.items() if not name.startswith("blk.1.")}
    return arch, keys, shapes | {"rope_freqs.weight": (16,)}


def two_gemma() -> tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]:
    """Two layers of tiny.py's gemma3, with rows of whole blocks."""
    arch, keys, shapes = gemma3()
    keys |= {"block_count": 2, "embedding_length": 64, "feed_forward_length": 96}
    kept = {
        name: ne for name, ne in shapes.items() if not name.startswith("blk.") or name.startswith(("blk.0.", "blk.1."))
    }
    return arch, keys, {name: tuple({48: 64, 80: 96}.get(n, n) for n in ne) for name, ne in kept.items()}


OTHERS["one_layer"] = one_layer
OTHERS["two_gemma"] = two_gemma


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton-model")


def models(name: str, folder: Path, *, exact: bool) -> tuple[Model, Model]:
    """A model on the triton backend and on the CPU. name: one of tiny.py's and its matrices' type, or a recipe:mix."""
    backends = get_backend("triton", exact=exact), get_backend("cpu")
    if ":" in name:
        mine, cpus = (Model(synthetic(name, layers=1), [backend]) for backend in backends)
        return mine, cpus
    path = folder / f"{name}.gguf"
    if not path.exists():
        write_model(path, *name.split())
    return load(path, [backends[0]]), load(path, [backends[1]])


def compare(a: Session, b: Session, limit: float, *pieces: int) -> None:
    """Pieces of so many tokens: the logits after each, and where a's work is done."""
    ids, start = tokens(40), 0
    for n in pieces:
        piece = ids[start : start + n]
        start += n
        error = nmse(a.eval(piece), b.eval(piece))
        assert error < limit, (n, error)
        (split,) = a.executable(n, 1).splits
        assert split.backend.name == "triton" and not split.copies
    assert not a.fallbacks()


@pytest.mark.parametrize(("name", "pieces"), [("llama F32", (14, 1)), ("gemma3 F32", (14, 1))])
def test_exact_logits_are_the_cpus(name: str, pieces: tuple[int, ...], folder: Path) -> None:
    mine, cpus = models(name, folder, exact=True)
    compare(mine.session(F32), cpus.session(F32), EXACT, *pieces)


@pytest.mark.parametrize(
    ("name", "cache", "pieces"),
    [
        ("one_layer Q8_0", "q4_0", (14, 1)),
        ("one_layer Q4_0", "q8_0", (14, 1)),
        ("two_gemma Q8_0", "f16", (14, 1)),
        ("tiny:q4_k_m", "f16", (1, 1)),
    ],
)
def test_fused_logits_are_near_the_cpus(name: str, cache: str, pieces: tuple[int, ...], folder: Path) -> None:
    mine, cpus = models(name, folder, exact=False)
    # Quantized caches round what has small errors already: to a neighbouring step now and then.
    options = SessionOptions(n_ctx=64, n_batch=16, type_k=cache, type_v=cache)
    compare(mine.session(options), cpus.session(options), ROUNDED, *pieces)


def named(group: Group) -> str:
    """A fusion, and whether only products read its result."""
    return str(group.kernel) + ", private" * bool(group.private)


def test_groups_of_a_step() -> None:
    """What a token's graph is fused to: a pattern that no longer fits the architecture's graph would show here. In the
    last layer wanted rows are picked between the product after the attention and the residual's sum."""
    model = Model(synthetic("tiny:q4_k_m", layers=2), [get_backend("triton", exact=False)])
    groups = model.session(F32).executable(1, 1).splits[0].groups
    start, end = (
        ["norm_mul, private", "projections", "rope_cache"],
        ["norm_mul, private", "gate_up_glu, private", "matmul_add"],
    )
    fused = [named(group) for group in groups if group.kernel]
    assert fused == [*start, "matmul_add", *end, *start, "add_norm, private", *end[1:], "norm_mul, private"]


def test_groups_of_a_step_of_gemma(folder: Path) -> None:
    """Each layer's first norm comes with the sum that ends the layer before. Four sequences take the same groups."""
    model, _ = models("two_gemma Q8_0", folder, exact=False)
    attention, rest = (
        ["projections", "norm_rope_cache"],
        ["norm_mul_add_norm, private", "gate_up_glu, private", "norm_mul_add_norm, private"],
    )
    for exe in (model.session(F32).executable(1, 1), model.engine(4, F32).executable(1, 4)):
        fused = [named(group) for group in exe.splits[0].groups if group.kernel]
        assert fused == ["norm_mul, private", *(2 * [*attention, *rest])]


def test_likeliest_tokens_are_those_of_the_logits(folder: Path) -> None:
    mine, _ = models("one_layer Q4_0", folder, exact=False)
    session, ids = mine.session(F32), tokens(8)
    found = [int(session.eval(ids).argmax())]
    found += list(session.likeliest(found[0], 3))
    session.reset()
    session.eval(ids)
    for token, following in zip(found, found[1:]):
        assert int(session.eval([token]).argmax()) == following


def test_drawn_tokens_are_the_hosts(folder: Path) -> None:
    mine, _ = models("one_layer Q4_0", folder, exact=False)
    session, ids, sampling = mine.session(F32), tokens(8), SamplerParams(temp=1.5, top_k=50, seed=3)
    found = list(choices(session, ids, 5, Sampler(sampling)))
    assert Sampler(sampling).device_params() in session._chained and len(session._chained) == 1
    session.reset()
    host, logits = Sampler(sampling), session.eval(ids)
    for token in found:
        assert host.sample(logits) == token
        logits = session.eval([token])


@pytest.mark.parametrize("name", ["one_layer Q8_0", "two_gemma Q8_0"])
def test_a_batch_of_two_sequences(name: str, folder: Path) -> None:
    mine, cpus = models(name, folder, exact=False)
    ids = np.array([tokens(9), tokens(9)[::-1]], np.int32)
    a, b = (model.engine(2, F32) for model in (mine, cpus))
    for piece in (ids[:, :8], ids[:, 8:]):
        found = a.read(dict(enumerate(piece)))
        assert nmse(found, b.read(dict(enumerate(piece)))) < ROUNDED
    tokens_of_each = found.argmax(1).astype(np.int32)
    (following,) = a.run_ahead(tokens_of_each, 1)
    assert np.array_equal(following, b.read(dict(enumerate(tokens_of_each[:, None]))).argmax(1))


def test_run_has_no_fallback_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tmp_path / "model.gguf", "llama", tokenizer="spm")
    command = ["run", str(path), "--backend", "triton", "-p", "a", "-n", "2", "--raw", "-c", "32", "--temp", "0"]
    assert main(command) == 0
    said = capsys.readouterr().err
    assert "generated 2 tokens" in said and "fallback" not in said
