"""Which parametrized tests run in `make test` with a few of their cases only; `make wide` runs the others.

These are the same code over more shapes, types and models, most of them in Triton's interpreter or an emulator of
Gluon's kernels, where a case takes seconds that take microseconds on a GPU. CI runs both; a plain `pytest` runs all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

#: Under tests/: of each test of this file, n: `make test` runs the first case and every n-th after it; 0: none.
EVERY = {
    "backends/cpu/test_cpu_integer.py": 3,
    "backends/cpu/test_fast_form.py": 5,
    "backends/triton/test_triton.py": 3,
    "backends/triton/test_triton_aot.py": 2,
    "backends/triton/test_triton_archs.py": 4,
    "backends/triton/test_triton_batch_mma.py": 5,
    "backends/triton/test_triton_batch_wgmma.py": 8,
    "backends/triton/test_triton_expert_wgmma.py": 10,
    "backends/triton/test_triton_experts.py": 5,
    "backends/triton/test_triton_fuse.py": 6,
    "backends/triton/test_triton_gemv.py": 5,
    "backends/triton/test_triton_latent.py": 5,
    "backends/triton/test_triton_mul_mat.py": 4,
    "backends/triton/test_triton_rows.py": 4,
    "backends/triton/test_triton_unfused.py": 4,
    "backends/triton/test_triton_varlen.py": 4,
    "backends/triton/test_triton_varlen_hopper.py": 5,
    "models/test_engine_paged.py": 3,
    "models/test_gguf_mutation.py": 2,
    "models/test_model_gradients.py": 3,
    "ops/test_ops.py": 2,
    "support/test_quick_interpreter.py": 0,
    "support/test_time_limits.py": 0,
    "tools/test_diff.py": 2,
    "tools/test_order.py": 4,
}


def mark(items: Sequence[pytest.Item]) -> None:
    """Gives the cases that `make test` leaves out the marker `wide`."""
    met = Counter[str]()
    for item in items:
        path, _, test = item.nodeid.partition("::")
        every = EVERY.get(path.removeprefix("tests/"))
        if every is None or item.get_closest_marker("aot"):
            continue
        name = f"{path}::{test.partition('[')[0]}"
        if every == 0 or met[name] % every:
            item.add_marker(pytest.mark.wide)
        met[name] += 1
