"""The mutation score's machinery: correct kernels pass, planted bugs are found, and a mutant that is none survives.

The whole score is `graphrt test --mutants`.
"""

from __future__ import annotations

import numpy as np
import pytest

from graphrt import ops  # noqa: F401  (registers every op)
from graphrt.testing import Case, all_cases
from graphrt.tools.conformance.mutants import ggml as mutants_ggml
from graphrt.tools.conformance.mutants.backend import KernelBackend
from graphrt.tools.conformance.mutants.pieces import KERNELS, Mutant
from graphrt.tools.conformance.mutants.score import Score, Trial, _try, score_lines
from graphrt.tools.conformance.mutants.table import (
    ATTENTION_MUTANTS,
    EXPERT_MUTANTS,
    MUTANTS,
    OP_MUTANTS,
    VARLEN_MUTANTS,
)
from graphrt.tools.conformance.run.step import run_case

NOTHING_BUT = frozenset[str]()


def some_cases(op: str, step: int) -> list[Case]:
    return [case for case in all_cases(op) if not case.needs_bytes][::step]


@pytest.mark.parametrize("op", sorted(KERNELS))
def test_correct_kernels_pass(op: str) -> None:
    for case in some_cases(op, 9):
        outcome = run_case(case, KernelBackend())
        assert outcome.status in ("pass", "unsupported"), f"{outcome.case}: {outcome.message}"


def test_table_has_at_least_40_mutants_of_distinct_names() -> None:
    names = [m.name for m in (*ATTENTION_MUTANTS, *OP_MUTANTS, *EXPERT_MUTANTS, *VARLEN_MUTANTS)]
    assert len(set(names)) == len(names) == len(MUTANTS)
    assert len([m for m in ATTENTION_MUTANTS if m.op == "FLASH_ATTN_EXT"]) >= 40
    assert len(VARLEN_MUTANTS) >= 25
    assert {m.op for m in MUTANTS.values()} == set(KERNELS)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda m: m.name)
def test_mutant_replaces_what_the_kernel_has(mutant: Mutant) -> None:
    assert mutant.pieces and mutant.what
    assert issubclass(mutant.kernel(), KERNELS[mutant.op])


def test_mutant_of_an_unknown_piece_is_refused() -> None:
    with pytest.raises(KeyError, match="no_such_piece"):
        KernelBackend(Mutant("typo", "ROPE", "", {"no_such_piece": lambda k: None}))


@pytest.mark.parametrize(
    "name",
    ["softcap_after_mask", "merge_without_rescale", "sink_twice", "gqa_modulo", "empty_row_nan", "f32_angle",
     "next_scale_matmul", "eps_outside", "index_batch_clamped", "soft_max_scale_missing", "lse_without_sink",
     "out_by_place", "unused_experts_skipped", "id_from_the_end_mul_mat_id", "ids_contiguous_add_id", "fill_keeps_nan",
     "value_scale_of_one_head_missing", "out_1_percent_large", "out_2_percent_small", "out_cut_off",
     "products_of_8_bits_1_percent_large"],
)  # fmt: skip
def test_mutant_is_killed_by_a_named_case(name: str) -> None:
    trial = _try(name, "quick", 0, NOTHING_BUT)
    assert not trial.survived
    assert trial.killed_by in {str(case) for case in all_cases(trial.op)}


def test_mutant_that_changes_nothing_survives_every_case_of_its_op() -> None:
    same = Mutant("same", "RMS_NORM", "no bug", {"energy": lambda k, x: np.square(x)})
    trial = _try(same, "quick", 0, NOTHING_BUT)
    assert trial.survived
    assert trial.tried == len(list(all_cases("RMS_NORM")))


def test_score_fails_with_a_survivor_and_with_a_correct_kernel_that_fails() -> None:
    dead = Trial("a", "ROPE", "turned back", "ROPE(x=1)", "wrong", 0.5, 1e-12, 1, 0.0)
    alive = Trial("b", "ROPE", "no bug", "", "", None, None, 7, 0.0)
    assert Score([dead]).ok
    assert not Score([dead, alive]).ok
    *_, last = score_lines(Score([dead, alive]))
    assert last.startswith("1 of 2 mutants killed (50 %)")
    assert any("SURVIVED 7 cases" in line for line in score_lines(Score([dead, alive])))
    assert not Score([dead], failures=[run_case(some_cases("ROPE", 1)[0], KernelBackend())]).ok


def test_where_a_mutant_cannot_show_its_result_is_the_same_bit_by_bit() -> None:
    mutants = [m for m in ATTENTION_MUTANTS if m.op == "FLASH_ATTN_EXT"]
    for case in some_cases("FLASH_ATTN_EXT", 23):
        inputs = case.build()
        bound = mutants_ggml.Bound(inputs)
        correct = bound.result(None).view(np.uint32)
        for mutant in (MUTANTS[m.name] for m in mutants):
            if not mutants_ggml._can_show(mutant, inputs):
                np.testing.assert_array_equal(bound.result(mutant).view(np.uint32), correct, err_msg=mutant.name)


def test_ggmls_rule_divides_by_the_device_and_passes_0_over_0() -> None:
    zeros, ones = np.zeros(4, np.float32), np.ones(4, np.float32)
    assert not mutants_ggml.ggml_fails(zeros, zeros)
    assert mutants_ggml.ggml_fails(np.array([np.nan, 1, 1, 1], np.float32), ones)
    assert mutants_ggml.ggml_fails(np.array([np.inf, 1, 1, 1], np.float32), ones)
    assert mutants_ggml.ggml_nmse(2 * ones, ones) == pytest.approx(0.25)
    assert not mutants_ggml.ggml_fails(ones * np.float32(1.02), ones)


def test_shapes_are_those_of_the_case() -> None:
    for case in some_cases("FLASH_ATTN_EXT", 40):
        assert case.without_values().describe() == case.build().result.describe()
