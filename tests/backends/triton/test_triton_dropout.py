"""Dropout of the triton backend in Triton's interpreter: the generator's bits, and the same weights left out whatever
the schedule, in the forward and in the gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt import ops, prepare
from graphrt.backends.triton.backend import TritonBackend
from graphrt.backends.triton.kernels.flash_attn.dropout import dropout_arguments, dropout_calls, kept_weights
from graphrt.backends.triton.launch import Launch
from graphrt.graph import Graph
from graphrt.ops.dropout import kept, left_out
from graphrt.ops.flash_attn_ext import FlashAttnParams
from graphrt.tensor import new_input

N, SEED, OFFSET, RATE = 40, 2**63 + 2**31 + 5, 2**32 - 2, 0.3


@triton.jit(do_not_specialize=["i_seq", "seed_low", "seed_high", "offset", "least"])
def _keep(p_out, i_seq, seed_low, seed_high, offset, least, BLOCK: tl.constexpr, CALLS: tl.constexpr):
    row, first = tl.program_id(0) * 16 + tl.arange(0, 16), tl.program_id(1) * BLOCK
    eight = tl.arange(0, BLOCK // 8)[None, :]
    made = kept_weights(
        row[:, None], first, eight, tl.program_id(2), i_seq, offset, seed_low, seed_high, least, CALLS
    )  # fmt: skip
    at = (tl.program_id(2) * 16 + row[:, None]) * 256 + first + tl.arange(0, BLOCK)[None, :]
    tl.store(p_out + at, made.to(tl.int8))


@pytest.mark.parametrize(("block", "rate"), [(16, 0.3), (32, 0.01), (128, 0.5)])
def test_the_same_bits_as_numpy(block: int, rate: float) -> None:
    for seq in (0, 3):
        out = torch.zeros(2, 16, 256, dtype=torch.int8)
        params = FlashAttnParams(1.0, dropout_p=rate, seed=SEED, offset=OFFSET)
        numbers = dropout_arguments(params)
        inverse = numbers.pop("inverse")
        args = {"p_out": out, "i_seq": seq, **numbers, "BLOCK": block, "CALLS": dropout_calls(params)}
        Launch(_keep, (1, 256 // block, 2), args)()
        np.testing.assert_array_equal(out.numpy() != 0, kept(rate, SEED, OFFSET, (4, 2, 16, 256))[seq])
        assert inverse == 1 / (1 - left_out(rate))


def _leaf(name: str, kind: str, *ne: int) -> Any:
    return new_input(kind, *ne, name=name)


def _forward(schedule: str | None, n_q: int) -> npt.NDArray[np.float32]:
    """The weights that values are multiplied with, [head, query, key]: all keys are alike, V is the identity."""
    q, k, v = _leaf("q", "f32", 64, n_q, 2), _leaf("k", "f16", 64, N, 1), _leaf("v", "f16", 64, N, 1)
    node = ops.flash_attn_ext(q, k, v, None, 0.1, dropout_p=RATE, seed=SEED, offset=OFFSET)
    exe = prepare(Graph(node), TritonBackend(schedule=schedule))
    exe.write(q, np.zeros(q.shape, np.float32))
    exe.write(k, np.zeros(k.shape, np.float16))
    exe.write(v, np.eye(N, 64, dtype=np.float16).reshape(v.shape))
    exe.run()
    return np.asarray(exe.read(node)).reshape(n_q, 2, 64)[..., :N].transpose(1, 0, 2)


@pytest.mark.parametrize("schedule", ["tile", "split", "stream_k"])
@pytest.mark.parametrize("n_q", [5, N])
def test_the_same_weights_in_every_schedule(schedule: str, n_q: int) -> None:
    expected = kept(RATE, SEED, OFFSET, (1, 2, n_q, N))[0] / (N * (1 - left_out(RATE)))
    np.testing.assert_allclose(_forward(schedule, n_q), expected, rtol=1e-3)


def test_the_same_weights_in_the_gradient_of_v() -> None:
    """With d_out the identity, v's gradient is the dropped weights, turned, summed over the heads that share v."""
    n_kv = 150  # more than a tile of keys
    d_out, q = _leaf("d_out", "f32", 64, 1, N), _leaf("q", "f32", 64, N, 1)
    k, v, lse = _leaf("k", "f16", 64, n_kv, 1), _leaf("v", "f16", 64, n_kv, 1), _leaf("lse", "f32", 1, N)
    params = FlashAttnParams(0.1, dropout_p=RATE, seed=SEED, offset=OFFSET)
    node = ops.flash_attn_back("v", d_out, q, k, v, d_out, lse, params)
    exe = prepare(Graph(node), TritonBackend())
    for t in (q, k, v):
        exe.write(t, np.zeros(t.shape, np.float16 if t.dtype.name == "f16" else np.float32))
    exe.write(d_out, np.eye(N, 64, dtype=np.float32).reshape(d_out.shape))
    exe.write(lse, np.full(lse.shape, np.log(n_kv), np.float32))
    exe.run()
    made = np.asarray(exe.read(node)).reshape(n_kv, 64)[:, :N]
    expected = kept(RATE, SEED, OFFSET, (1, 1, N, n_kv))[0, 0].T / (n_kv * (1 - left_out(RATE)))
    np.testing.assert_allclose(made, expected, rtol=1e-3)


def test_who_has_neither_says_so() -> None:
    from support.aot_arch import target_of

    from graphrt.backend import Usage
    from graphrt.backends.triton.kernels.flash_attn.decode_launch import Decode
    from graphrt.backends.triton.kernels.flash_attn.fusions import attention_of
    from graphrt.backends.triton.kernels.flash_attn.problem import Problem
    from graphrt.backends.triton.memory import allocate

    q, k, v = _leaf("q", "f32", 64, 1, 2), _leaf("k", "f16", 64, N, 1), _leaf("v", "f16", 64, N, 1)
    for given, said in (({"dropout_p": 0.5}, "dropout"), ({"attn_bias": _leaf("b", "f32", N, 1)}, "attn_bias")):
        node = ops.flash_attn_ext(q, k, v, None, 1.0, **given)
        p = Problem(attention_of(node), lambda t: (allocate(t.nbytes, Usage.COMPUTE, "cpu"), 0))
        assert said in (Decode(p, target_of("sm_90")).serves() or "")
