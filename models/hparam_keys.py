"""Keys of GGUF files that graphrt does not read, as data: which of them change no result, and which name a variant."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Keys without "<arch>." that say how a model was trained or made, or what another key says too.
IGNORABLE = frozenset({
    "features_length", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.type", "use_parallel_residual",
    "attention.rope_pattern", "classifier.output_labels", "use_alibi",
})  # fmt: skip
#: Beginnings of keys that say how experts are mixed, which have no effect where there are none.
OF_EXPERTS = ("expert_", "experts_per_group", "leading_dense_block_count", "interleave_moe_layer_step", "moe_")
#: Keys that no family here could honour, and those that only families with experts do.
NO_FURTHER_TOKENS = {"nextn_predict_layers": "layers that predict further tokens are"}
VARIANTS = {"expert_count": "experts are"} | NO_FURTHER_TOKENS
#: Where 1 is no change, beside 0.
_FACTORS = ("_scale", ".scale", "attn_factor", "freq_scale")


def changes_the_result(key: str, value: Any) -> bool:
    """Whether a key that nobody reads could change what a model says. Zeros, and factors of 1, switch nothing on."""
    if key in IGNORABLE:
        return False
    if isinstance(value, (bool, int, float)):
        return bool(value) and not (key.endswith(_FACTORS) and value == 1)
    return not isinstance(value, np.ndarray) or bool(value.any())
