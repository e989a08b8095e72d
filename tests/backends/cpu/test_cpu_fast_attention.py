"""The fast CPU kernel of attention for few queries against float64, as test_cpu_fast.py has the others."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

gguf: Any = pytest.importorskip("gguf")
from graphrt.backends.cpu import fast  # noqa: E402

if reason := fast.available():
    pytest.skip(reason, allow_module_level=True)
from support.cpu_kernels import Memory, at, decode, encode, nmse, run  # noqa: E402

pytestmark = pytest.mark.usefixtures("many_chunks")


def attend64(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None, scale: float, softcap: float,
    sinks: np.ndarray | None, slopes: np.ndarray | None,
) -> np.ndarray:  # fmt: skip
    """q [S, H, Q, Dk], k and v [S, Hkv, N, D], mask [s, h, Q, N] -> [S, Q, H, Dv]; masked keys are never read."""
    n_seq, n_head, n_q, _ = q.shape
    out = np.zeros((n_seq, n_q, n_head, v.shape[-1]))
    for s, h, i in itertools.product(range(n_seq), range(n_head), range(n_q)):
        m = np.zeros(k.shape[2]) if mask is None else mask[s % len(mask), h % mask.shape[1], i].astype(np.float64)
        live = m != -np.inf
        if not live.any():
            continue
        h_kv = h * k.shape[1] // n_head
        score = k[s, h_kv][live].astype(np.float64) @ q[s, h, i] * scale
        if softcap:
            score = softcap * np.tanh(score / softcap)
        score += (1.0 if slopes is None else slopes[h]) * m[live]
        top = max(score.max(), -np.inf if sinks is None else sinks[h])
        p = np.exp(score - top)
        total = p.sum() + (0.0 if sinks is None else np.exp(sinks[h] - top))
        out[s, i, h] = p @ v[s, h_kv][live].astype(np.float64) / total
    return out


def attend(
    mem: Memory, rng: np.random.Generator, *, k_type: str = "f16", v_type: str = "f16", d_k: int = 64, d_v: int = 64,
    n_q: int = 1, n_kv: int = 100, n_head: int = 6, n_head_kv: int = 2, n_seq: int = 1, softcap: float = 0.0,
    sinks: bool = False, alibi: bool = False, mask: np.ndarray | None = None, poison: bool = True,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Runs the kernel and float64 on random data; returns both results. K and V lie [N, Hkv, D], as a cache does."""
    q = mem.put(rng.standard_normal((n_seq, n_q, n_head, d_k)).astype(np.float32))
    caches, decoded = [], []
    for name, width in ((k_type, d_k), (v_type, d_v)):
        raw = encode(rng, name, (n_seq, n_kv, n_head_kv, width))
        decoded.append(decode(name, raw).transpose(0, 2, 1, 3))
        raw = raw.copy()
        if mask is not None and poison:
            seen = np.broadcast_to((mask != -np.inf).any(axis=(1, 2)), (n_seq, n_kv))
            raw[~seen] = 0xFF  # NaN in every type
        caches.append(mem.put(raw))
    k, v = caches
    m = mem.put(mask) if mask is not None else None
    sink = mem.put(rng.standard_normal(n_head).astype(np.float32) * 3) if sinks else None
    slope = mem.put(rng.uniform(0.1, 1, n_head).astype(np.float32)) if alibi else None
    out = mem.nan(n_seq, n_q, n_head, d_v)
    step = fast.flash_attn(
        k_type, v_type, d_k=d_k, d_v=d_v, n_q=n_q, n_kv=n_kv, n_head=n_head, n_head_kv=n_head_kv, n_seq=n_seq,
        q=at(q), q_nb=(q.strides[1], q.strides[2], q.strides[0]),
        k=at(k), k_nb=(k.strides[1], k.strides[2], k.strides[0]),
        v=at(v), v_nb=(v.strides[1], v.strides[2], v.strides[0]),
        out=at(out), out_nb=(out.strides[2], out.strides[1], out.strides[0]), scale=d_k**-0.5, softcap=softcap,
        mask=at(m) if m is not None else 0,
        mask_nb=(m.strides[2], m.strides[1], m.strides[0]) if m is not None else (0, 0, 0),
        mask_ne=(m.shape[1], m.shape[0]) if m is not None else (1, 1),
        sinks=at(sink) if sink is not None else 0, slopes=at(slope) if slope is not None else 0,
    )  # fmt: skip
    run(step)
    want = attend64(q.transpose(0, 2, 1, 3), *decoded, mask, d_k**-0.5, softcap, sink, slope)
    return out, want


def causal(n_q: int, n_kv: int, used: int, n_mask: tuple[int, int] = (1, 1)) -> np.ndarray:
    """The mask of a cache with `used` cells, the last n_q of them this step's queries: [ne3, ne2, n_q, n_kv]."""
    cell, query = np.arange(n_kv), used - n_q + np.arange(n_q)[:, None]
    m = np.where(cell <= query, 0.0, -np.inf).astype(np.float16)
    return np.broadcast_to(m, (*n_mask, n_q, n_kv)).copy()


@pytest.mark.parametrize("k_type,v_type", [(t, t) for t in fast.KV_TYPES] + [("q8_0", "f16"), ("f32", "q4_0")])
@pytest.mark.parametrize("n_q", [1, 9])
def test_attention_types(k_type: str, v_type: str, n_q: int, mem: Memory, rng: np.random.Generator) -> None:
    out, want = attend(mem, rng, k_type=k_type, v_type=v_type, n_q=n_q, n_kv=150, mask=causal(n_q, 150, 131))
    assert nmse(out, want) < 1e-11


@pytest.mark.parametrize(
    "n_q,n_head,n_head_kv",
    [(9, 4, 2), (40, 9, 3), (33, 1, 1), (16, 40, 1), (1, 1, 1), (1, 9, 3), (1, 10, 2), (3, 8, 2), (8, 2, 2)],
)
@pytest.mark.parametrize("n_kv,used", [(1, 1), (65, 50), (640, 300), (640, 640), (131, 129)])
def test_attention_groups_and_lengths(
    n_q: int, n_head: int, n_head_kv: int, n_kv: int, used: int, mem: Memory, rng: np.random.Generator
) -> None:
    mask = causal(n_q, n_kv, max(used, min(n_q, n_kv)))
    out, want = attend(mem, rng, n_q=n_q, n_head=n_head, n_head_kv=n_head_kv, n_kv=n_kv, mask=mask)
    assert nmse(out, want) < 1e-11


@pytest.mark.parametrize(
    "features",
    [
        {"softcap": 5.0, "d_k": 72, "d_v": 40},
        {"sinks": True, "n_kv": 700},
        {"alibi": True, "n_q": 2, "n_seq": 2},
        {"sinks": True, "softcap": 20.0, "alibi": True, "d_k": 128, "d_v": 80, "n_q": 2},
        {"d_k": 192, "d_v": 128, "n_head": 4, "n_head_kv": 1, "k_type": "bf16"},
        {"sinks": True, "n_q": 21},
        {"softcap": 5.0, "d_k": 72, "d_v": 43, "n_q": 33, "k_type": "f16", "v_type": "f32"},
        {"sinks": True, "softcap": 20.0, "alibi": True, "d_k": 96, "d_v": 80, "n_q": 12, "n_seq": 2, "n_kv": 130},
    ],
    ids=lambda f: "-".join(f),
)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_features(features: dict[str, Any], masked: bool, mem: Memory, rng: np.random.Generator) -> None:
    n_seq, n_q, n_kv = (features.get(key, default) for key, default in (("n_seq", 1), ("n_q", 1), ("n_kv", 100)))
    mask = None
    if masked:  # holes, values, and a broadcast over heads and sequences
        mask = rng.standard_normal((n_seq, 2, n_q, n_kv)).astype(np.float16)
        mask[rng.random(mask.shape) < 0.4] = -np.inf
        mask[..., 16:48] = -np.inf
    out, want = attend(mem, rng, mask=mask, **features)
    assert nmse(out, want) < 1e-11


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("n_q", [3, 40])
def test_attention_row_that_sees_nothing_is_zero(sinks: bool, n_q: int, mem: Memory, rng: np.random.Generator) -> None:
    mask = causal(n_q, 600, 600)
    mask[0, 0, 1] = -np.inf
    out, want = attend(mem, rng, n_q=n_q, n_kv=600, mask=mask, sinks=sinks)
    assert not out[0, 1].any()
    assert nmse(out, want) < 1e-11


@pytest.mark.parametrize("n_q", [2, 11])
def test_attention_nan_reaches_only_the_rows_that_see_it(n_q: int, mem: Memory, rng: np.random.Generator) -> None:
    n_kv, d = 80, 32
    q = mem.put(rng.standard_normal((n_q, 1, d)).astype(np.float32))
    for poisoned in range(2):
        k, v = (rng.standard_normal((n_kv, d)).astype(np.float16) for _ in range(2))
        (k, v)[poisoned][40] = np.nan
        k, v = mem.put(k), mem.put(v)
        mask = mem.put(np.zeros((n_q, n_kv), np.float16))
        mask[0, 40] = -np.inf
        out = mem.nan(n_q, d)
        run(fast.flash_attn(
            "f16", "f16", d_k=d, d_v=d, n_q=n_q, n_kv=n_kv, n_head=1, n_head_kv=1, n_seq=1, q=at(q), q_nb=(4 * d, 0, 0),
            k=at(k), k_nb=(2 * d, 0, 0), v=at(v), v_nb=(2 * d, 0, 0), out=at(out), out_nb=(0, 4 * d, 0), scale=1.0,
            mask=at(mask), mask_nb=(2 * n_kv, 0, 0),
        ))  # fmt: skip
        assert np.isfinite(out[0]).all()
        assert np.isnan(out[1:]).all()
