"""Dropout and biases of Hopper's attention without a GPU: its source on numpy arrays, and the bits that it reads."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graphrt.backends.triton import device
from graphrt.testing import Case, all_cases

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support import varlen_emulation
from support.aot_arch import target_of

from graphrt.backends.triton.backend import TritonBackend
from graphrt.backends.triton.kernels.flash_attn.dropout import dropout_arguments
from graphrt.backends.triton.kernels.flash_attn.dropout_bits import TILE, attention_dropout_bits
from graphrt.backends.triton.kernels.flash_attn.dropout_launch import MOST_BYTES, KeptBits, too_many
from graphrt.backends.triton.launch import Launch
from graphrt.ops.dropout import kept
from graphrt.ops.flash_attn_ext import FlashAttnParams

CASES = [c for c in all_cases("FLASH_ATTN_EXT") if re.search(r"n_q=140,.*dropout_p", str(c))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case: Case) -> None:
    """Weights have 11 bits."""
    chosen, ran, found, expected = varlen_emulation.run(case, 4, len(str(case)), "tile")
    assert chosen.kernel == "hopper", chosen.refused
    assert ran.index("attention_dropout_bits") < ran.index("hopper_flash_attn"), ran
    assert np.isfinite(found).all()
    assert np.linalg.norm(found - expected) <= 6e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("both", [False, True])
def test_bits(both: bool) -> None:
    """By query and by key, of several heads and sequences, bit for bit those of numpy."""
    rate, seed, offset, (n_seq, n_head, n_q, n_kv) = 0.3, 2**63 + 2**31 + 5, 2**32 - 2, (2, 2, TILE, 2 * TILE)
    numbers = dropout_arguments(FlashAttnParams(1.0, dropout_p=rate, seed=seed, offset=offset))
    del numbers["inverse"]
    words = torch.zeros(2, n_seq, n_head, 1, 2, TILE, TILE // 32, dtype=torch.int32)
    args = {"p_by_query": words[0], "p_by_key": words[1], "n_head": n_head, **numbers, "BY_KEY": both, "PDL": False}
    Launch(attention_dropout_bits, (2, 1, n_head * n_seq), args)()
    found = np.unpackbits(words.numpy().view(np.uint8), axis=-1, bitorder="little").reshape(*words.shape[:-1], TILE)
    expected = kept(rate, seed, offset, (n_seq, n_head, n_q, n_kv)).reshape(n_seq, n_head, 1, TILE, 2, TILE)
    np.testing.assert_array_equal(found[0] != 0, expected.transpose(0, 1, 2, 4, 3, 5))
    np.testing.assert_array_equal(found[1] != 0, expected.transpose(0, 1, 2, 4, 5, 3) & both)


def _problem(offset: int, n_q: int = 300) -> Any:
    params = FlashAttnParams(1.0, dropout_p=0.5, seed=3, offset=offset)
    return SimpleNamespace(n_q=n_q, n_kv=200, n_head=2, n_seq=1, dropout_p=0.5, params=params)


def test_attentions_of_one_size_share_memory_and_draw_their_own() -> None:
    bits, target = KeptBits(), target_of("sm_90")
    found = [bits.of(_problem(offset), target, both) for offset, both in ((0, True), (0, True), (1, True), (0, True))]
    assert [len(steps) for _, _, steps in found] == [1, 0, 1, 1]
    assert len({by_query.data_ptr() for by_query, _, _ in found}) == 1
    by_query, by_key, steps = bits.of(_problem(0), target, False)
    assert by_query.numel() == 2 * 3 * 2 * TILE * TILE // 32 and by_key is None and len(steps) == 1


def test_bits_that_take_too_much_memory_are_refused() -> None:
    n_q = 8 * MOST_BYTES // (2 * 2 * TILE)
    assert too_many(_problem(0, n_q)) is None
    assert str(too_many(_problem(0, n_q + 1))).startswith(f"dropout's bits may take {MOST_BYTES:,} bytes, here")


def test_the_form_that_adds_in_any_order_promises_no_bits() -> None:
    assert [TritonBackend(backward=form).deterministic for form in ("split", "fused-k", "fused-q")] == [
        True,
        True,
        False,
    ]
