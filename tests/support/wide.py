"""Which parametrized tests run in `make test` with a few of their cases only; `make wide` runs the others.

These are the same code over more shapes, types and models, most of them in Triton's interpreter or an emulator of
Gluon's kernels, where a case takes seconds that take microseconds on a GPU. CI runs a share of these, another one each
day (`make wide SHARE=1/3`); `make wide` and a plain `pytest` run all.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import pytest

#: Under tests/: of each test of this file, or of one test (file::name), n: `make test` runs the first case and every
#: n-th after it; 0: none. A test's own row goes before its file's.
EVERY = {
    "backends/cpu/test_cpu_amx.py::test_products": 2,
    "backends/cpu/test_cpu_experts.py::test_many_tokens": 3,
    "backends/cpu/test_cpu_fast.py::test_kernels_are_loaded_from_disk_in_the_next_process": 0,
    "backends/cpu/test_cpu_fast_attention.py::test_attention_types": 3,
    "backends/cpu/test_cpu_integer.py": 3,
    "backends/cpu/test_cpu_integer.py::test_code_for_other_machines": 6,
    "backends/cpu/test_fast_form.py": 8,
    "backends/test_broken_inputs.py::test_on_the_cpu": 3,
    "backends/test_rounded_activations.py::test_a_wrong_kernel_does_not_pass": 3,
    "backends/test_sample.py::test_the_op_chooses_as_the_sampler": 3,
    "backends/triton/test_joined_protocol.py::test_a_row_of_several_programs": 2,
    "backends/triton/test_triton.py": 3,
    "backends/triton/test_triton_aot.py": 2,
    "backends/triton/test_triton_archs.py": 6,
    "backends/triton/test_triton_attention_back.py::test_case": 6,
    "backends/triton/test_triton_attention_back.py::test_one_launch_for_several_gradients": 3,
    "backends/triton/test_triton_back_hopper.py": 4,
    "backends/triton/test_triton_back_packed.py::test_packed_sequences": 3,
    "backends/triton/test_triton_back_packed.py::test_sequences_do_not_touch_one_another": 3,
    "backends/triton/test_triton_backward.py": 3,
    "backends/triton/test_triton_batch_mma.py": 5,
    "backends/triton/test_triton_batch_wgmma.py": 12,
    "backends/triton/test_triton_expert_wgmma.py": 16,
    "backends/triton/test_triton_experts.py": 8,
    "backends/triton/test_triton_fuse.py": 9,
    "backends/triton/test_triton_gemv.py": 8,
    "backends/triton/test_triton_joined.py::test_ranks_that_wait_for_each_other": 2,
    "backends/triton/test_triton_latent.py": 8,
    "backends/triton/test_triton_model.py": 3,
    "backends/triton/test_triton_mul_mat.py": 4,
    "backends/triton/test_triton_packing.py": 3,
    "backends/triton/test_triton_passes.py::test_every_form_gives_the_right_result": 2,
    "backends/triton/test_triton_rotated.py": 2,
    "backends/triton/test_triton_rows.py": 4,
    "backends/triton/test_triton_small_ops.py": 3,
    "backends/triton/test_triton_unfused.py": 4,
    "backends/triton/test_triton_varlen.py": 4,
    "backends/triton/test_triton_varlen_hopper.py": 5,
    "models/test_chat.py::test_bombs_are_stopped": 4,
    "models/test_chat_process.py::test_the_system_stops_what_python_does_not": 3,
    "models/test_continuous_batch.py": 3,
    "models/test_draft.py::test_drafts_change_nothing": 4,
    "models/test_engine_paged.py": 5,
    "models/test_generation.py::test_drawn_ahead_and_by_the_host_are_the_same": 2,
    "models/test_gguf_mutation.py": 4,
    "models/test_given_back.py": 0,
    "models/test_hub.py::test_disk_errors": 4,
    "models/test_model_gradients.py": 6,
    "models/test_models.py::test_caches_cost_no_more_than_their_rounding": 3,
    "models/test_page_pool.py::test_random_operations": 4,
    "models/test_ranks.py::test_four_processes": 0,
    "models/test_ranks.py::test_four_ranks_share_heads_of_k": 3,
    "models/test_ranks.py::test_two_ranks_have_whole_blocks_of_quantized_weights": 4,
    "models/test_ranks.py::test_two_ranks_say_what_one_does": 4,
    "models/test_session_state.py": 2,
    "models/test_stages.py::test_four_processes_in_two_stages": 0,
    "ops/test_flash_attn_cases.py": 3,
    "ops/test_gradients.py": 3,
    "ops/test_ops.py": 10,
    "runtime/test_packaging.py::test_it_works_from_elsewhere": 0,
    "runtime/test_packaging.py::test_the_sdist_builds_the_same_wheel": 0,
    "support/test_fuzz.py": 0,
    "support/test_quick_interpreter.py": 0,
    "support/test_time_limits.py": 0,
    "tools/chat/test_chat_ranks.py::test_a_chat_over_ranks_is_that_of_one": 2,
    "tools/chat/test_chat_ranks.py::test_ctrl_c_stops_all_ranks_at_one_place": 3,
    "tools/cli/test_cli_ranks.py::test_bench_over_ranks": 0,
    "tools/cli/test_cli_ranks.py::test_perplexity_over_ranks": 0,
    "tools/cli/test_cli_ranks.py::test_samples_over_ranks": 0,
    "tools/cli/test_cli_ranks.py::test_torchrun_starts_the_ranks": 0,
    "tools/cli/test_cli_verbs.py::test_a_terminal_that_knows_only_ascii": 0,
    "tools/conformance/test_conformance.py::test_a_crash_or_a_hang_ends_its_case_only": 3,
    "tools/conformance/test_conformance.py::test_the_cpu_is_right": 2,
    "tools/conformance/test_conformance.py::test_the_plugin_is_right": 0,
    "tools/conformance/test_mutants.py::test_mutant_is_killed_by_a_named_case": 2,
    "tools/serve/test_bench_serve.py::test_a_server_of_ours": 0,
    "tools/serve/test_deterministic.py::test_no_text_depends_on_others": 4,
    "tools/serve/test_deterministic.py::test_on_a_gpu_too": 0,
    "tools/serve/test_responses.py::test_requests_of_the_servers_own_description": 0,
    "tools/serve/test_soak.py::test_a_server_that_is_killed_begins_again": 0,
    "tools/serve/test_soak.py::test_clients_that_stall_are_sent_away": 0,
    "tools/test_bench_model.py::test_a_large_tensor_is_cut_from_the_pool_in_whole_blocks": 5,
    "tools/test_bench_model.py::test_a_model_gives_logits_of_about_one": 5,
    "tools/test_bench_model.py::test_of_a_large_model_a_part_is_compared": 0,
    "tools/test_bench_model.py::test_on_a_gpu_a_whole_batch_is_compared": 0,
    "tools/test_bench_model.py::test_values_have_a_known_spread_and_no_mean": 5,
    "tools/test_check.py::test_the_gpu_backend_is_asked_without_a_gpu": 3,
    "tools/test_diff.py": 2,
    "tools/test_diff.py::test_the_gpu_backend": 0,
    "tools/test_interrupts.py::test_ctrl_c_at_any_import_is_one_line": 0,
    "tools/test_order.py": 6,
    "tools/test_profile_ranks.py::test_run_profiles_ranks": 2,
    "tools/test_rank_faults.py": 10,
    "tools/test_ranked_tools.py::test_ranks_that_are_there_have_the_same_bits": 3,
    "tools/test_share.py::test_a_crash_is_a_problem": 0,
    "tools/test_share.py::test_a_run_with_other_bits_fails": 0,
    "tools/test_trace.py::test_traced_values_are_those_of_the_reference": 2,
    "tools/test_two_hosts.py": 0,
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


def shares(text: str) -> tuple[int, int]:
    """k and n of "k/n": which of every n are meant; all of them where nothing is said."""
    k, _, n = (text or "0/1").partition("/")
    return int(k), int(n)


def share(items: list[pytest.Item]) -> list[pytest.Item]:
    """Leaves of the wide cases the k-th of every n where GRAPHRT_SHARE says k/n; returns those that it took out."""
    k, n = shares(os.environ.get("GRAPHRT_SHARE", ""))
    wide = [item for item in items if item.get_closest_marker("wide")]
    out = [item for i, item in enumerate(wide) if i % n != k % n]
    gone = {id(item) for item in out}
    items[:] = [item for item in items if id(item) not in gone]
    return out
