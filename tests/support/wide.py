"""Which parametrized tests run in `make test` with a few of their cases only; `make wide` runs the others.

These are the same code over more shapes, types and models, most of them in Triton's interpreter or an emulator of
Gluon's kernels, where a case takes seconds that take microseconds on a GPU. CI runs both; a plain `pytest` runs all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

#: Under tests/: of each test of this file, or of one test (file::name), n: `make test` runs the first case and every
#: n-th after it; 0: none. A test's own row goes before its file's.
EVERY = {
    "backends/cpu/test_cpu_integer.py": 3,
    "backends/cpu/test_cpu_integer.py::test_code_for_other_machines": 6,
    "backends/cpu/test_fast_form.py": 5,
    "backends/test_rounded_activations.py::test_a_wrong_kernel_does_not_pass": 3,
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
    "backends/triton/test_triton_model.py": 3,
    "backends/triton/test_triton_mul_mat.py": 4,
    "backends/triton/test_triton_rows.py": 4,
    "backends/triton/test_triton_unfused.py": 4,
    "backends/triton/test_triton_varlen.py": 4,
    "backends/triton/test_triton_varlen_hopper.py": 5,
    "models/test_chat_process.py::test_the_system_stops_what_python_does_not": 3,
    "models/test_engine_paged.py": 3,
    "models/test_gguf_mutation.py": 4,
    "models/test_given_back.py": 0,
    "models/test_model_gradients.py": 3,
    "ops/test_ops.py": 4,
    "support/test_fuzz.py": 0,
    "support/test_quick_interpreter.py": 0,
    "support/test_time_limits.py": 0,
    "tools/cli/test_cli_verbs.py::test_a_terminal_that_knows_only_ascii": 0,
    "tools/conformance/test_conformance.py::test_a_crash_or_a_hang_ends_its_case_only": 3,
    "tools/test_bench_model.py::test_a_model_gives_logits_of_about_one": 5,
    "tools/test_bench_model.py::test_of_a_large_model_a_part_is_compared": 0,
    "tools/test_bench_model.py::test_on_a_gpu_a_whole_batch_is_compared": 0,
    "tools/test_check.py::test_the_gpu_backend_is_asked_without_a_gpu": 3,
    "tools/test_diff.py": 2,
    "tools/test_diff.py::test_the_gpu_backend": 0,
    "tools/test_interrupts.py::test_ctrl_c_at_any_import_is_one_line": 0,
    "tools/test_order.py": 4,
    "tools/test_share.py::test_a_crash_is_a_problem": 0,
    "tools/test_share.py::test_a_run_with_other_bits_fails": 0,
}


def mark(items: Sequence[pytest.Item]) -> None:
    """Gives the cases that `make test` leaves out the marker `wide`."""
    met = Counter[str]()
    for item in items:
        path, _, test = item.nodeid.partition("::")
        file = path.removeprefix("tests/")
        name = f"{file}::{test.partition('[')[0]}"
        every = EVERY.get(name, EVERY.get(file))
        if every is None or item.get_closest_marker("aot"):
            continue
        if every == 0 or met[name] % every:
            item.add_marker(pytest.mark.wide)
        met[name] += 1
