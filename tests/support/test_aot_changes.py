"""What aot_changes.py takes for the same code."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from support.aot_changes import Case, difference, plain

PTX = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry add_rows(
    .param .u64 add_rows_param_0
)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<2>;
    .loc 1 20 4 // rows.py:20:4
    ld.param.u64 %rd1, [add_rows_param_0];
    ld.global.u32 %r1, [%rd1];
    add.s32 %r2, %r1, 1; // begin
    st.global.u32 [%rd1], %r2;
    ret;
}
"""


def _case(text: str, kernel: str = "add_rows") -> Case:
    return Case("sm_90 add", 0, kernel, plain(text, kernel))


def test_a_kernel_that_moved_and_has_another_name_is_the_same(tmp_path: Path) -> None:
    moved = PTX.replace("add_rows", "summed").replace(".loc 1 20 4 // rows.py:20:4", ".loc 2 7 1 // sums.py:7:1")
    assert difference(_case(PTX), _case(moved, "summed"), tmp_path) == ("", [])


def test_other_registers_are_told_from_other_instructions(tmp_path: Path) -> None:
    renamed = PTX.replace("%r2", "%r3")
    what, lines = difference(_case(PTX), _case(renamed), tmp_path)
    assert what == "registers"
    assert len(lines) == 4
    more = PTX.replace("%r1, 1;", "%r1, 2;")
    assert difference(_case(PTX), _case(more), tmp_path)[0] == "1 lines more, 1 fewer"
