"""What a mutant is: one kernel with one or two of its pieces replaced; and when the replaced piece is at work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphrt.tensor import Tensor
from graphrt.testing import Inputs, dequantize
from graphrt.tools.conformance.mutants.attention import Attention
from graphrt.tools.conformance.mutants.experts import AddId, Fill, MulMatId
from graphrt.tools.conformance.mutants.kernels import MulMat, RmsNorm, Rope, SetRows, SoftMax
from graphrt.tools.conformance.mutants.memory import Kernel
from graphrt.tools.conformance.mutants.schedule import kv_block
from graphrt.tools.conformance.mutants.varlen import Varlen

Pieces = Mapping[str, Callable[..., Any]]
Condition = Callable[[Tensor], bool]

KERNELS: dict[str, type[Kernel]] = {
    k.op: k for k in (Attention, MulMat, RmsNorm, Rope, SetRows, SoftMax, MulMatId, AddId, Fill)
}
KERNELS["FLASH_ATTN_LSE"] = Attention
KERNELS["FLASH_ATTN_VARLEN"] = KERNELS["FLASH_ATTN_VARLEN_LSE"] = Varlen


def always(node: Tensor) -> bool:
    return True


def any_inputs(inputs: Inputs) -> bool:
    return True


@dataclass(frozen=True)
class Mutant:
    """A planted bug. what: a sentence; pieces: what replaces the kernel's methods of those names.

    active: which nodes have the feature that is broken. Others run the correct kernel.
    shows_on: inputs on which the result can differ from the correct kernel's at all; for others it is the same bit by
    bit, which saves most of the runs on ggml's grid and which test_mutants.py checks.
    """

    name: str
    op: str
    what: str
    pieces: Pieces = field(compare=False)
    active: Callable[[Tensor], bool] = field(default=always, compare=False)
    shows_on: Callable[[Inputs], bool] = field(default=any_inputs, compare=False)

    def kernel(self) -> type[Kernel]:
        """The kernel with its pieces replaced. Raises KeyError for a piece that it has not."""
        correct = KERNELS[self.op]
        for name in self.pieces:
            if not hasattr(correct, name):
                raise KeyError(f"{correct.__name__} has no piece {name!r}")
        return type(f"{correct.__name__}_{self.name}", (correct,), dict(self.pieces))


# -- features of attention nodes


def softcap(node: Tensor) -> bool:
    return bool(node.params.softcap)


def scored(node: Tensor) -> bool:
    return bool(node.params.score)


def alibi(node: Tensor) -> bool:
    return bool(node.params.max_bias)


def masked(node: Tensor) -> bool:
    return node["mask"] is not None


def sinks(node: Tensor) -> bool:
    return node["sinks"] is not None


def mask_heads(node: Tensor) -> bool:
    mask = node["mask"]
    return mask is not None and mask.ne[2] > 1


def mask_heads_in_turn(node: Tensor) -> bool:
    """Several heads have a mask each, and there are more heads than masks."""
    mask, q = node["mask"], node["q"]
    return mask is not None and 1 < mask.ne[2] < q.ne[2]


def mask_seqs(node: Tensor) -> bool:
    mask = node["mask"]
    return mask is not None and mask.ne[3] > 1


def mask_seqs_in_turn(node: Tensor) -> bool:
    mask, q = node["mask"], node["q"]
    return mask is not None and 1 < mask.ne[3] < q.ne[3]


def mask_gapped(node: Tensor) -> bool:
    mask = node["mask"]
    return mask is not None and not mask.is_contiguous


def masked_queries(node: Tensor) -> bool:
    """Several queries and a mask."""
    return node["mask"] is not None and node["q"].ne[1] > 1


def alibi_odd(node: Tensor) -> bool:
    """ALiBi with a number of heads that is no power of two."""
    n_head = node["q"].ne[2]
    return alibi(node) and n_head & (n_head - 1) != 0


def ragged(node: Tensor) -> bool:
    """The last block of keys is not full."""
    n_kv = node["k"].ne[1]
    return n_kv % kv_block(n_kv) != 0


def grouped(node: Tensor) -> bool:
    """Several query heads share a KV head, and there are several KV heads."""
    return node["q"].ne[2] > node["k"].ne[2]


def sequences(node: Tensor) -> bool:
    return node.ne[3] > 1


def types(*names: str) -> Callable[[Tensor], bool]:
    """A source has one of these types."""
    return lambda node: any(s.dtype.name in names for s in node.sources())


def long_buffer(node: Tensor) -> bool:
    """A source lies in a tensor of over 2^31 bytes."""
    return any(s.root.nbytes > 2**31 for s in node.sources())


# -- features of attention's inputs


def _mask_values(inputs: Inputs) -> np.ndarray[Any, Any]:
    mask = inputs.result["mask"]
    return np.zeros(0) if mask is None else inputs.values[mask.root]


def hides(inputs: Inputs) -> bool:
    """The mask hides a key. Without that every row sees a key in every block that is not all padding."""
    return bool(np.isneginf(_mask_values(inputs)).any())


def has_blocks(inputs: Inputs) -> bool:
    """A block of the mask may be hidden or zeros: there is -inf or 0, or a last block of one key."""
    values, k = _mask_values(inputs), inputs.result["k"]
    return bool((np.isneginf(values) | (values == 0)).any()) or k.ne[1] % 16 == 1


def unfinite(inputs: Inputs) -> bool:
    """NaN or infinity in the memory of k or v."""
    kv = [s for name, s in inputs.result.sources_by_name().items() if name in ("k", "v")]
    return any(not np.isfinite(dequantize(inputs.values[s.root], s.dtype)).all() for s in kv)
