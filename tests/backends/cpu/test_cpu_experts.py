"""Products of experts and many tokens: pairs in order by their expert, each expert's rows unpacked once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

gguf: Any = pytest.importorskip("gguf")
from graphrt.backends.cpu import fast  # noqa: E402

if reason := fast.available():
    pytest.skip(reason, allow_module_level=True)
from support.cpu_kernels import Memory, at, decode, encode, nmse, run  # noqa: E402

from graphrt.backends.cpu.fast import dot, integer, jit  # noqa: E402

pytestmark = pytest.mark.usefixtures("many_chunks")

#: Tokens of two slots each. Expert 0 has none, 1 has one, 2 two, 3 three, 4 the rest; some are no expert's.
IDS = np.array(
    [[4, 1], [2, 4], [-1, 4], [4, 2], [3, 5], [4, 4], [2**31 - 1, 3], [4, 3], [4, 4], [4, -(2**31)]], np.int32
)
N_EXPERT = 5
#: Nibbles, rest blocks, signed codes, offsets, two runs to 32 values, points of a grid.
TYPES = ("q4_0", "q8_0", "q4_K", "q6_K", "nvfp4", "mxfp4", "iq3_s")
HERE = [d for d, has in dot.CHOICES if has(jit.host())]


def in_order(mem: Memory, ids: np.ndarray) -> np.ndarray:
    n_tok, n_slots = ids.shape
    spread = mem.put(np.repeat(ids, 2, axis=1))
    starts = mem.put(np.full(fast.order_bytes(N_EXPERT, ids.size) // 4, -1, np.int32))
    run(fast.expert_order(
        starts=at(starts), ids=at(spread), n_slots=n_slots, n_tok=n_tok, n_expert=N_EXPERT,
        ids_nb=(2 * spread.strides[1], spread.strides[0]),
    ))  # fmt: skip
    return starts


def test_pairs_in_order(mem: Memory) -> None:
    found = in_order(mem, IDS)
    wanted = np.where((IDS < 0) | (IDS >= N_EXPERT), N_EXPERT, IDS).ravel()
    assert found[: N_EXPERT + 1].tolist() == [int((wanted < e).sum()) for e in range(N_EXPERT + 1)]
    assert found[N_EXPERT + 1] == IDS.size
    assert found[N_EXPERT + 3 :].tolist() == np.argsort(wanted, kind="stable").tolist()


EIGHT_BITS = [(HERE[0], name, 8) for name in ("q4_K", "q6_K") if HERE[0].parts(8) == 1]


@pytest.mark.parametrize(
    ("by", "name", "bits"),
    [(by, name, 16) for by in HERE for name in (TYPES if by is HERE[0] else ("q4_K",))] + EIGHT_BITS,
    ids=lambda v: getattr(v, "name", v),
)  # fmt: skip
@pytest.mark.parametrize(("own_x", "biased"), [(False, True), (True, False)])
def test_many_tokens(
    by: dot.Dot, name: str, bits: int, own_x: bool, biased: bool, mem: Memory, rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows of several units and of blocks that fill none, more than 16 of them; gaps between all rows."""
    monkeypatch.setattr(integer, "best_dot", lambda host: by)
    n_tok, n_slots = IDS.shape
    n_rows, n = 19, {32: 288, 64: 192, 256: 512}[fast.TYPES[name].size]
    w = encode(rng, name, (N_EXPERT, n_rows, n))
    held = mem.put(np.pad(w, ((0, 0), (0, 2), (0, 6)), constant_values=0xFF), offset=2)
    x = mem.put(rng.standard_normal((n_tok * (n_slots if own_x else 1), n)).astype(np.float32))
    form = fast.panel_form_of(name, bits)
    nb = form.row_bytes(n)
    rows = mem.put(np.full((len(x), nb), 0xFF, np.uint8))
    run(fast.round_rows(form, dst=at(rows), x=at(x), n_rows=len(x), n=n, x_nb=x.strides[0]))
    bias = mem.put(rng.standard_normal((N_EXPERT, n_rows + 1)).astype(np.float32))
    y, starts = mem.nan(n_tok, n_slots, n_rows + 2), in_order(mem, IDS)
    panels = mem.put(np.full((2, fast.panel_bytes(form, n_tok * n_slots)), 0xFF, np.uint8))
    y[...] = 7.0
    run(fast.expert_gemm(
        name, y=at(y), w=at(held), x=at(rows), starts=at(starts), panels=at(panels), n_panels=2, n_rows=n_rows, n=n,
        n_slots=n_slots, n_tok=n_tok, n_expert=N_EXPERT, w_nb=held.strides[1], expert_nb=held.strides[0],
        y_nb=(y.strides[1], y.strides[0]), x_nb=(nb, nb * n_slots) if own_x else (0, nb), bits=bits,
        bias=at(bias) if biased else 0, bias_nb=bias.strides[0],
    ), 3)  # fmt: skip
    known = (IDS >= 0) & (IDS < N_EXPERT)
    chosen = np.where(known, IDS, 0)
    given = np.broadcast_to(x.reshape(n_tok, -1, n), (n_tok, n_slots, n)).astype(np.float64)
    wanted = np.einsum("tsrk,tsk->tsr", decode(name, w).astype(np.float64)[chosen], given)
    wanted += biased * bias[chosen, :n_rows]
    assert nmse(y[..., :n_rows][known], wanted[known]) < (1e-8 if bits == 16 else 1e-4)
    assert np.isnan(y[..., :n_rows][~known]).all() and (y[..., n_rows:] == 7.0).all()
