"""Whether a case's inputs call for what a backend did twice.

The GPU backend's fast prefill kernels leave to the portable one the tiles whose result is not finite (K and V may hold
NaN in cells that the mask hides) or whose logits are huge. Other tiles done again are a defect that the repair hides.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from graphrt.tensor import Tensor
from graphrt.testing import Inputs, dequantize

#: Logits up to this size, in units of log2, a fast kernel must get right by itself (EXACT_TO of
#: flash_attn/hopper/consumer.py).
LARGEST = 512.0


def uncalled(inputs: Inputs, redone: int) -> list[str]:
    """What is wrong with so many pieces of a case's result having been computed twice: a sentence, or nothing."""
    if redone == 0 or _calls_for_it(inputs):
        return []
    return [
        f"a fast kernel's result must need no repair where inputs are finite and logits are below {LARGEST:g}, here "
        f"{redone} tiles were done again; run it with compute-sanitizer, or several at once with --share"
    ]


def _calls_for_it(inputs: Inputs) -> bool:
    """Some input is not finite, or by the norms of q and k some logit may be as large as LARGEST."""
    node = inputs.result
    if node.op != "FLASH_ATTN_EXT":
        return True  # of other results nothing is known
    mask, numbers = node["mask"], {t: _numbers(inputs, t) for t in node.sources()}
    if mask is not None:
        numbers[mask] = np.where(np.isneginf(numbers[mask]), 0.0, numbers[mask])  # hidden, which is no large value
    if not all(np.isfinite(values).all() for values in numbers.values()):
        return True
    norms = [float(np.sqrt(np.square(numbers[t]).sum(-1)).max()) for t in (node["q"], node["k"])]
    bias = float(np.abs(numbers[mask]).max()) if mask is not None else 0.0  # ALiBi's slopes are 1 at most
    return bool((math.prod(norms) * abs(node.params.scale) + bias) * math.log2(math.e) >= LARGEST)


def _numbers(inputs: Inputs, source: Tensor) -> npt.NDArray[np.float64]:
    """All values of the input that a source looks at, float64, rows last: what it leaves out may only call for more."""
    return dequantize(inputs.values[source.root], source.root.dtype).astype(np.float64)
