"""Kernels compile for GPUs, without one: for sm_90 in most forms, elsewhere each in some (GRAPHRT_AOT=all: in all;
GRAPHRT_SHARE=1/3: every kernel, and a third of its forms).

No spills in loops, memory fits, no register is read unset, no wgmma waits for the one before it, no barrier's memory is
used for anything else, no minimum or maximum loses a NaN where aot_minima.py doesn't say why it may; and each kernel
touches only the memory that it declares, and before its gdc_wait only what it declares early. No table of attention's
says more programs of a multiprocessor than fit.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from support import ROOT, TESTS
from support.aot_arch import ARCHS, ROWS_ALONE, SHARED, SMALL
from support.aot_barriers import overlaps
from support.aot_minima import KERNELS, PLAIN, plain_minima

from graphrt.backends.triton.kernels.flash_attn.score_code import HELPERS

#: Seconds for the kernels of one part; all of them take hours.
LIMIT = None if os.environ.get("GRAPHRT_AOT") == "all" else 1500
PARTS = [(arch, f"{i}/{n}") for arch in ARCHS for n in [4 if arch == "sm_90" else 1] for i in range(n)]
#: Kernels that spill in a loop and are kept: parts of their names, and why.
SPILLING = {
    ("gfx942", "(512, 512)", "'f32'"): "the sums alone fill the registers",
    ("sm_90 decode", "(256, 256)", "q8_0"): "41 us where the portable kernel takes 57 (D256, GQA 16, 20000 keys, H100)",
    ("sm_90 decode", "(256, 256)", "q4_0"): "as q8_0",
    ("sm_100 decode", "(256, 256)", "q8_0"): "as on sm_90; not measured",
    ("sm_100 decode", "(256, 256)", "q4_0"): "as on sm_90; not measured",
    ("sm_90 varlen", "(256, 256)", "softcap=30"): "6 times in k-blocks that a row sees in part; not measured",
    ("attention back", "(576, 512)"): "sums of 32 keys or 16 queries fill the registers; not measured",
    ("gfx942", "back_keys", "score='gate'"): "18 registers, of products of f32 and a slope; not measured",
    ("hopper_attn_back_queries", "256"): "with a mask, 139 times with ALiBi and a soft cap; not measured",
    ("hopper_attn_back_keys", "(128,", "500, 30.0"): "17 times with a mask that TMA can't bring; not measured",
    ("hopper_attn_back_keys", "(128,", " 0, 30.0"): "10 times in one warpgroup, where dS is stored; see BENCHMARKS.md",
    ("hopper_attn_back_keys", "(128,", "'dropout"): "8 times between heads, none between steps; see BENCHMARKS.md",
    ("hopper_attn_back_queries", "(128,", "'dropout, bias"): "3 times; see BENCHMARKS.md",
    ("hopper_attn_back_queries", "(64,", "'dropout, bias 500"): "19 times where TMA can't bring the bias; not measured",
    ("hopper_attn_back_keys", "(128,", "'bias 500"): "22 times where TMA can't bring the bias; not measured",
    ("hopper_attn_back_bias", "(128,", "30.0"): "196 times with a soft cap, where no kernel of keys runs; not measured",
    ("hopper_attn_back_keys", "(128,", "score='softcap'"): "once, with a mask; 0.75 of plain without one (H200)",
    ("hopper_attn_back_keys", "(64,", "500"): "21 times with a mask that TMA can't bring; not measured",
    ("hopper_attn_back_packed_keys", "'packed"): "none of plain ones; where softcap, ALiBi or a window take them",
    ("hopper_attn_back_packed_keys", "packed=True"): "8 times, of causal ones; 309 TFLOP/s so (H200)",
    ("hopper_attn_back_packed_queries", "(128,"): "23 times in blocks that a tile sees in part; see BENCHMARKS.md",
    ("hopper_attn_back_fused", "(128,"): "11 times in one warpgroup, 49 and more with a mask; see BENCHMARKS.md",
    ("sm_90 prefill", "(128, 128)", "q8_0"): "with a mask; 352 TFLOP/s where blocks of 64 keys give 333 (H100)",
    ("sm_90 prefill", "(128, 128)", "f8_e4m3", "prec=0"): "12 times with a mask, as q8_0; not measured",
    ("sm_90 prefill", "(128, 128)", "f8_e4m3", "prec=8"): "13 sums; 677 TFLOP/s, blocks of 64 keys 617 (H200)",
}
#: Hopper's own.
HOPPER = {
    "batch_wgmma", "expert_wgmma", "gather_rows", "hopper_flash_attn", "hopper_mla_attn",
    "attention_back_lse", "hopper_attn_back_keys", "hopper_attn_back_queries", "hopper_attn_back_wide",
    "hopper_attn_back_bias", "hopper_attn_back_fused", "hopper_attn_back_packed_keys", "hopper_attn_back_stored",
    "attention_back_bias_sum",
    "hopper_attn_back_packed_queries", "attention_back_slots", "order_packed_tiles", "attention_dropout_bits",
    "hopper_fp8_attn", "turn_values", "hopper_quant_attn", "hopper_varlen_attn", "hopper_varlen_mla", "list_tiles",
}  # fmt: skip
#: Kernels that never run on an architecture.
ELSEWHERE = {
    "sm_80": HOPPER,
    "sm_90": set[str](),
    "sm_100": HOPPER,
    "gfx942": {
        *HOPPER,
        "batch_mma",
        "flash_attn_decode",
        "flash_attn_decode_append",
        "flash_attn_decode_blocks",
        "flash_attn_decode_passes",
        "flash_attn_varlen_decode",
    },  # fmt: skip
}


def _kept(name: str) -> bool:
    return any(all(part in name for part in parts) for parts in SPILLING)


def _run(*args: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(TESTS)])
    command = [sys.executable, str(TESTS / "support" / "aot.py"), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of the tests, for all of its processes."""
    own = tmp_path_factory.getbasetemp()
    found = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "places-of-minima"
    found.mkdir(exist_ok=True)
    return found


@pytest.mark.aot
@pytest.mark.timeout(0 if os.environ.get("GRAPHRT_AOT") == "all" else 1800)
@pytest.mark.parametrize(("arch", "part"), PARTS)
def test_kernels_compile(arch: str, part: str, shared: Path) -> None:
    """Whichever part ends last finds what all have noted: places that no kernel needs any more."""
    kernels = [json.loads(line) for line in _run(arch, part).splitlines()]
    assert kernels, "no kernel of this part"
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[arch], kernel
        assert not kernel["unset"], kernel
        assert not kernel["serialized"], kernel
        assert not kernel["reused"], kernel
        assert not kernel["undeclared"], kernel
        assert kernel["loop_spills"] == 0 or _kept(kernel["name"]), kernel
        enough = kernel["per_sm"] is None or kernel["per_sm"] <= kernel["holds"]
        assert enough, f"a table says more programs than fit, by its {kernel['bound']}: {kernel}"
        assert set(kernel["plain"]) <= set(PLAIN), f"{kernel}: propagate NaN, or say in aot_minima.py why not"
    places = sorted({place for kernel in kernels for place in kernel["plain"]})
    note = shared / f"{arch} {part.replace('/', ' of ')}"
    note.with_suffix(".part").write_text(json.dumps(places), encoding="utf-8")
    note.with_suffix(".part").rename(note)
    notes = [p for p in shared.iterdir() if not p.suffix]
    if len(notes) == len(PARTS) and not os.environ.get("GRAPHRT_SHARE"):
        needed = {place for p in notes for place in json.loads(p.read_text(encoding="utf-8"))}
        assert needed == set(PLAIN), f"no kernel has a plain minimum there: {sorted(set(PLAIN) - needed)}"


@pytest.mark.aot
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", SMALL)
def test_attention_fits_where_shared_memory_is_small(arch: str) -> None:
    """Every row of the table of GPUs with 99 KiB a program: GeForce, L40S, RTX 6000 Ada."""
    kernels = [json.loads(line) for line in _run(arch, "0/1", f"{arch} row").splitlines()]
    assert len(kernels) > 10
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[arch] and not kernel["undeclared"], kernel
        assert kernel["loop_spills"] <= ("'f32'" in kernel["name"]), kernel  # heads of 256: one register, on sm_120


@pytest.mark.aot
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ROWS_ALONE)
def test_attention_s_table_compiles_for_amd_s_next_ones(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every row of the table, with its registers and spills for who asks (-s)."""
    kernels = [json.loads(line) for line in _run(arch, "0/1", f"{arch} row").splitlines()]
    assert len([k for k in kernels if k["kernel"] == "flash_attn"]) >= 7
    with capsys.disabled():
        for k in kernels:
            print(f"{k['name'][:72]} {k['kernel']}: {k['registers']} VGPR, {k['spills']} spilled, {k['shared']} bytes")
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[arch] and not kernel["undeclared"], kernel
        assert kernel["spills"] == 0 or ("(512, 512)" in kernel["name"] and "'f32'" in kernel["name"]), kernel
        assert kernel["per_sm"] is None or kernel["per_sm"] <= kernel["holds"], kernel


PTX = """
.loc 1 2 3 // standard.py:171:12 @[ {place} ]
max.f32 %r1, %r2, %r3;
"""


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("max.f32 %f1, %f2, 0f00000000;", True), ("@%p1 min.ftz.f32 %f1, %f2, %f3;", True),
        ("{ .reg .f32 a; abs.f32 a, $1; max.f32 $0, a, b; }", True), ("max.bf16x2 %r1, %r2, %r3;", True),
        ("max.xorsign.abs.f16x2 %r1, %r2, %r3;", True), ("redux.sync.max.f32 %r1, %r2, -1;", True),
        ("add.sat.f32 %f1, %f2, %f3;", True), ("cvt.rn.sat.f16.f32 %h1, %f1;", True),
        ("max.NaN.f32 %f1, %f2, 0f00000000;", False), ("min.ftz.NaN.f16x2 %r1, %r2, %r3;", False),
        ("redux.sync.max.NaN.f32 %r1, %r2, -1;", False), ("max.s32 %r1, %r2, %r3;", False),
        ("min.u64 %rd1, %rd2, %rd3; // max.f32", False), (".maxntid 128", False),
        ("redux.sync.max.s32 %r1, %r2, -1;", False),
    ],
)  # fmt: skip
def test_minima_that_lose_nan_are_found(code: str, found: bool) -> None:
    assert bool(plain_minima(code)) == found


def test_a_place_too_much_and_one_too_few_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the last part; and by each part a kernel with a plain minimum that isn't listed."""
    fine = {"name": "a", "shared": 0, "unset": "", "serialized": "", "reused": [], "undeclared": [], "loop_spills": 0}
    fine |= {"per_sm": 1, "holds": 1}
    first, *rest = PLAIN
    said = {"0/2": [first], "1/2": rest}
    module = sys.modules[__name__]
    monkeypatch.delenv("GRAPHRT_SHARE", raising=False)
    monkeypatch.setattr(module, "PARTS", [("sm_90", part) for part in said])
    monkeypatch.setattr(module, "_run", lambda arch, part: json.dumps(fine | {"plain": said[part]}))
    for part in said:
        test_kernels_compile("sm_90", part, tmp_path)
    said["1/2"] = rest[1:]
    with pytest.raises(AssertionError, match=rest[0]):
        test_kernels_compile("sm_90", "1/2", tmp_path)
    said["0/2"] = ["experts/wgmma.py deliver"]
    with pytest.raises(AssertionError, match="propagate NaN, or say"):
        test_kernels_compile("sm_90", "0/2", tmp_path)


def test_a_minimum_has_its_place() -> None:
    """The innermost function of the kernels' own files; two files of one name are told apart by their lines."""
    path = KERNELS / "soft_max.py"
    line = next(
        i for i, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if "top = tl.max(x, 1)" in text
    )
    assert plain_minima(PTX.format(place=f"soft_max.py:{line}:17")) == ["soft_max.py soft_max_rows"]
    assert plain_minima(PTX.format(place="elsewhere.py:1:1")) == ["max.f32"]


@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_is_missing(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is a function of triton.jit or gluon.jit that none of these functions names, nor a score function.

    Each is in the share of any day.
    """
    monkeypatch.setenv("GRAPHRT_SHARE", "7/8")
    jitted, named = set[str](), set(HELPERS)
    for path in KERNELS.rglob("*.py"):
        for f in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(f, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in f.decorator_list):
                jitted.add(f.name)
                nodes = list(ast.walk(f))
                own = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
                named |= {n.id for n in nodes if isinstance(n, ast.Name)} - own
                named |= {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    compiled = set(_run(arch, "list").split())
    assert len(jitted - named) > 40
    assert jitted - named - compiled == ELSEWHERE[arch]


def _allocations(*after: str) -> str:
    """IR of a group of barriers and a buffer behind it, and what stands after them."""
    barriers = "%bars = ttg.local_alloc {allocation.offset = 256 : i32} : () -> !ttg.memdesc<2x1xi64, #shared, #smem>"
    buffer = "%data = ttg.local_alloc {allocation.offset = 272 : i32} : () -> !ttg.memdesc<4x64xf16, #shared1, #smem>"
    return "\n".join([barriers, buffer, *after])


VIEWS = ("%0 = ttg.memdesc_index %bars[%c0]", "%1 = ttg.memdesc_index %bars[%c1]")
WARPS = "ttg.warp_specialize(%p, %bars, %data) attributes {allocation.offset = 0 : i32}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (_allocations(WARPS), None),
        (_allocations(WARPS).replace("272", "264"), "lies in %data"),
        (_allocations(WARPS, '"tt.reduce"(%x) {allocation.offset = 264 : i32}'), "holds scratch at 264"),
        (_allocations("ttg.warp_specialize(%p, %bars_1, %data)"), "without being invalidated"),
        (_allocations(*VIEWS, "ttng.inval_barrier %0", "ttng.inval_barrier %1"), None),
        (_allocations(*VIEWS, "ttng.inval_barrier %0", "ttng.inval_barrier %11"), "without being invalidated"),
    ],
)
def test_a_barrier_whose_memory_is_reused_is_found(text: str, said: str | None) -> None:
    found = overlaps(text)
    assert said in found[0] if said else not found
