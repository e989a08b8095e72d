"""The architectures on the triton backend: a step of each is one split, and a few are run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import tiny
from support.adapters import write_adapter
from support.tiny import tokens, write_model
from support.tiny_archs import DECODERS, ENCODERS, TEXTS, chosen, experts

pytest.importorskip("triton")

from graphrt import get_backend
from graphrt.backends.triton import device
from graphrt.models import Model, load
from graphrt.models.embed import Embedder
from graphrt.models.engine import SessionOptions
from graphrt.models.engine_paged import PagedEngine
from graphrt.testing import nmse

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

F32 = SessionOptions(n_ctx=32, n_batch=8, type_k="f32", type_v="f32")
PAGED = replace(F32, page=16)
LATENT = SessionOptions(n_ctx=16, n_batch=16, type_k="f32", type_v="f32")
#: Few layers, for the interpreter's sake, of what the GPU backend has kernels of its own for: soft caps and windows,
#: ALiBi and limits, a parallel feed-forward on two norms, experts, sinks, latent attention.
SHORT = {
    "short-gemma2": replace(DECODERS["gemma2-caps"], layers=2, keys={"attention.sliding_window": 4}),
    "short-mpt": replace(DECODERS["mpt"], layers=1),
    "short-falcon": replace(DECODERS["falcon-40b"], layers=1),
    "short-qwen3moe": replace(DECODERS["qwen3moe"], layers=1),
    "short-gpt-oss": replace(
        DECODERS["gpt-oss"],
        n=32,
        d=16,
        layers=2,
        extra={"post_attention_norm": (32,), "attn_sinks": (4,)},
        experts=experts(32, 32, 4, bias=True),
        keys={"attention.sliding_window": 4} | chosen(4, 2, feed_forward_length=32),
    ),
    "short-deepseek2": DECODERS["deepseek2"],
    "short-deepseek2-lite": replace(DECODERS["deepseek2-lite"], layers=2),
}
tiny.OTHERS["latent"] = replace(DECODERS["deepseek2-lite"], layers=1).model
tiny.OTHERS.update({name: row.model for name, row in SHORT.items()})


def loaded(path: Path, name: str, *, exact: bool) -> tuple[Model, Model]:
    """On the triton backend and, as the reference, on the CPU."""
    write_model(path, name)
    return load(path, [get_backend("triton", exact=exact)]), load(path, "cpu", exact=True)


@pytest.mark.parametrize("name", [name for name, row in DECODERS.items() if row.layers < 10])
def test_a_step_is_one_split(tmp_path: Path, name: str) -> None:
    mine, _ = loaded(tmp_path / "m.gguf", name, exact=False)
    session = mine.session(F32)
    for n in (8, 1):
        (split,) = session.executable(n, 1).splits
        assert split.backend.name == "triton" and not split.copies
    assert not session.fallbacks()


@pytest.mark.parametrize("name", [name for name, row in DECODERS.items() if row.layers < 10])
def test_a_step_over_pages_is_one_split(tmp_path: Path, name: str) -> None:
    """With the fusions that a step over rings has."""
    mine, _ = loaded(tmp_path / "m.gguf", name, exact=False)
    engine, rings = mine.engine(3, PAGED), mine.engine(3, F32)
    assert isinstance(engine, PagedEngine)
    for size in (engine.largest_size(9, 2), engine.largest_size(3, 3)):
        for step in (*engine.choosing(size), engine.prepared(size)):
            (split,) = step.exe.splits
            assert split.backend.name == "triton" and not split.copies
    (other,) = rings.executable(1, 3).splits
    fused, wanted = (Counter(g.kernel for g in s.groups if g.kernel) for s in (split, other))
    assert fused == wanted
    assert not engine.fallbacks()


@pytest.mark.parametrize("name", ["short-gemma2", "short-gpt-oss", "short-deepseek2", "short-mpt"])
def test_logits_over_pages_are_the_cpus(tmp_path: Path, name: str) -> None:
    """Prompts and single tokens together, in steps that are larger than what they read."""
    mine, cpus = (model.engine(3, PAGED) for model in loaded(tmp_path / "m.gguf", name, exact=False))
    ids = tokens()
    for part in ({0: ids[:7]}, {0: ids[7:8], 2: ids[9:14]}, {0: ids[8:9], 1: ids[:1], 2: ids[14:15]}):
        assert nmse(mine.read(part), cpus.read(part)) < 1e-6


def test_adapters_are_of_the_same_split(tmp_path: Path) -> None:
    """Two texts that have one, and one that has none, in steps over pages."""
    models = loaded(tmp_path / "m.gguf", "short-mpt", exact=False)
    write_adapter(tmp_path / "a.gguf", models[1], targets=("attn_output", "ffn_up"))
    engines = list[PagedEngine]()
    for model in models:
        model.use_adapters({"a": tmp_path / "a.gguf"})
        engine = model.engine(3, PAGED)
        assert isinstance(engine, PagedEngine)
        engine.use_adapters(1, [0.0])
        engine.use_adapters(2, [-0.5])
        engines.append(engine)
    mine, cpus = engines
    for ids in (tokens()[:3], tokens()[3:4]):
        part = dict.fromkeys(range(3), ids)
        found, wanted = mine.read(part), cpus.read(part)
        assert nmse(found, wanted) < 1e-6 and nmse(wanted[0], wanted[1]) > 1e-4 < nmse(wanted[2], wanted[1])
    for step in mine._prepared.values():
        (split,) = step.exe.splits
        assert split.backend.name == "triton" and not split.copies


@pytest.mark.parametrize("name", ENCODERS)
def test_a_text_is_one_split(tmp_path: Path, name: str) -> None:
    mine, _ = loaded(tmp_path / "m.gguf", name, exact=False)
    for pooling in ("none", "mean", "cls"):
        (split,) = Embedder(mine.encoder, mine.backends).executable(9, 2, pooling).splits
        assert split.backend.name == "triton" and not split.copies


@pytest.mark.parametrize("name", SHORT)
def test_logits_are_the_cpus(tmp_path: Path, name: str) -> None:
    mine, cpus = (model.session(F32) for model in loaded(tmp_path / "m.gguf", name, exact=False))
    ids = tokens()
    for piece in (ids[:7], ids[7:8]):
        assert nmse(mine.eval(piece), cpus.eval(piece)) < 1e-6


def test_latent_attention_fused_is_unfused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than gemv.py takes, then one; some at once and one by one; several sequences."""
    write_model(tmp_path / "m.gguf", "latent", "F16")
    model, ids = load(tmp_path / "m.gguf", [get_backend("triton", exact=False)]), tokens()
    found: list[list[np.ndarray]] = []
    for patterns in ("latent_rope_cache,head_products", "0"):
        monkeypatch.setenv("GRAPHRT_FUSE", patterns)
        session, engine = model.session(LATENT), model.engine(2, LATENT)
        groups = [group.kernel for group in session.executable(1, 1).splits[0].groups if group.kernel]
        assert groups == (["latent_rope_cache", "head_products"] if patterns != "0" else [])
        many = [session.eval(ids[:9]), session.eval(ids[9:10])]
        session.reset()
        at_once = session.eval(ids[:3])
        session.reset()
        assert nmse([session.eval([t]) for t in ids[:3]][-1], at_once) < 1e-6
        lines = np.reshape(ids[:6], (2, 3))
        read = [engine.read(dict(enumerate(part))) for part in (lines[:, :2], lines[:, 2:])]
        found.append([*many, at_once, *read])
    for fused, apart in zip(*found):
        assert nmse(fused, apart) < 1e-6


def test_embeddings_are_the_cpus(tmp_path: Path) -> None:
    mine, cpus = loaded(tmp_path / "m.gguf", "nomic-bert", exact=False)
    texts = TEXTS[:2]
    assert nmse(np.stack(mine.embed(texts, "mean")), np.stack(cpus.embed(texts, "mean"))) < 1e-6
