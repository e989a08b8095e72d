"""Keys of GGUF files that graphrt does not read, as data: which of them change no result, and which name a variant."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Keys without "<arch>." that say how a model was trained or made, or what another key says too.
IGNORABLE = frozenset({
    "features_length", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.type", "use_parallel_residual",
    "attention.rope_pattern", "classifier.output_labels", "use_alibi",
})  # fmt: skip
#: They count experts, layers that predict further tokens and the like, which have no effect where there are none.
_COUNTS = ("expert_", "experts_per_group", "leading_dense_block_count", "interleave_moe_layer_step")
#: Keys that no file of a family here has, and that no family here could honour.
VARIANTS = {
    "expert_count": "experts are",
    "nextn_predict_layers": "layers that predict further tokens are",
}
#: Where 1 is no change, beside 0.
_FACTORS = ("_scale", ".scale", "attn_factor", "freq_scale")


def changes_the_result(key: str, value: Any) -> bool:
    """Whether a key that nobody reads could change what a model says. Zeros, and factors of 1, switch nothing on."""
    if key in IGNORABLE or key.startswith(_COUNTS):
        return False
    if isinstance(value, (bool, int, float)):
        return bool(value) and not (key.endswith(_FACTORS) and value == 1)
    return isinstance(value, str) or bool(np.any(value))
