"""Compiles kernels for GPUs that are not here, from the arguments that the launcher would give them.

Run as a program in a process without TRITON_INTERPRET (see test_triton_aot.py): `python aot.py ARCH` prints one JSON
line a compiled kernel: what it was compiled for, shared memory, registers, spills, how many programs of it a
multiprocessor holds and how many a table says, and what it does to memory that its
declaration (backends/triton/accesses.py) does not have. `aot.py ARCH 0/3` compiles the first
of every three, `aot.py ARCH 0/1 WORD` those whose names have a word, and `aot.py ARCH list` prints the names of the
functions that it would compile. GRAPHRT_SHARE=k/n leaves of the rows a part (shared_out).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphrt.backend import Place, Usage
from graphrt.backends.triton.kernels.flash_attn import (
    chooser,
    configs,
    portable,
)
from graphrt.backends.triton.kernels.flash_attn.decode_configs import (
    find_decode_config,
    programs_held,
    shared_bytes,
)
from graphrt.backends.triton.kernels.flash_attn.decode_launch import Decode, bounded
from graphrt.backends.triton.kernels.flash_attn.fusions import attention_of
from graphrt.backends.triton.kernels.flash_attn.kernel import AttentionKernel, Scratch
from graphrt.backends.triton.kernels.flash_attn.kernels import kernels_of
from graphrt.backends.triton.kernels.flash_attn.launcher import BLOCK_APPEND
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlan, MaskPlans
from graphrt.backends.triton.kernels.flash_attn.passes_launch import DecodePasses
from graphrt.backends.triton.kernels.flash_attn.problem import Problem, Tiling
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.backends.triton.occupancy import occupancy
from graphrt.dtypes import dtype
from graphrt.ops.cases.scores import SCORES
from graphrt.ops.flash_attn_ext import flash_attn_ext
from graphrt.ops.key_panels import PANELS, ROWS, panel_width
from graphrt.ops.view import permute, view
from graphrt.tensor import Tensor
from support import append_emulation, block_steps, panel_steps
from support.aot_arch import target_of
from support.aot_barriers import reused_barriers
from support.aot_minima import plain_minima
from support.kernel_accesses import differences
from support.wide import shares

COMPILE_ALL = os.environ.get("GRAPHRT_AOT") == "all"
BIN = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Shape:
    """d: of K and V; rows of queries that share a KV head; types of K and V; v_in_k: V is the start of K's rows;
    score: a name of ops/cases/scores.py's SCORES; panels: K lies in panels; q_type: of q; runs: a head's keys lie side
    by side, not a key's heads."""

    d: tuple[int, int]
    n_q: int
    types: tuple[str, str]
    v_in_k: bool = False
    softcap: float = 0.0
    n_kv: int = 512
    score: str = ""
    dropout_p: float = 0.0
    prec: int = 0
    panels: bool = False
    q_type: str = "f32"
    runs: bool = False


def gpu_target(arch: str) -> GPUTarget:
    """Triton's target of an architecture."""
    return GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)


def problem(shape: Shape) -> Problem:
    """A problem of that shape over host memory: 4 heads on one of 2 KV heads, with a mask."""
    places: dict[Tensor, Place] = {}

    def leaf(kind: str, ne: tuple[int, ...], name: str) -> Tensor:
        t = Tensor(dtype(kind), ne, name=name)
        places[t] = (TritonBuffer(torch.zeros(t.nbytes, dtype=torch.uint8), Usage.COMPUTE), 0)
        return t

    def cache(kind: str, d: int, name: str) -> Tensor:
        if shape.runs:
            return leaf(kind, (d, n_kv, 2), name)
        return permute(leaf(kind, (d, 2, n_kv), name), 0, 2, 1, 3)

    (d_k, d_v), n_kv = shape.d, shape.n_kv
    q = leaf(shape.q_type, (d_k, shape.n_q, 8), "q")
    if shape.panels:
        x = panel_width(dtype(shape.types[0]))
        k = leaf(shape.types[0], (x, n_kv, d_k // x * 2), "k")
    else:
        k = cache(shape.types[0], d_k, "k")
    v = view(k, (d_v, n_kv, 2), k.nb[1:]) if shape.v_in_k else cache(shape.types[1], d_v, "v")
    mask = leaf("f16", (n_kv, shape.n_q), "mask")
    score = SCORES[shape.score](8, n_kv) if shape.score else None
    dropout = {"dropout_p": shape.dropout_p, "seed": 3, "offset": 5} if shape.dropout_p else {}
    layout = PANELS if shape.panels else ROWS
    node = flash_attn_ext(
        q, k, v, mask, 0.1, softcap=shape.softcap, score=score, prec=shape.prec, k_layout=layout, **dropout
    )  # fmt: skip
    places[node] = (TritonBuffer(torch.zeros(node.nbytes, dtype=torch.uint8), Usage.COMPUTE), 0)
    return Problem(attention_of(node), lambda t: (places[t.root][0], t.view_offs))


def portable_launches(arch: str, shape: Shape, config: configs.Config, schedule: str) -> list[Launch]:
    """The portable kernel and its fixup as the launcher makes them."""
    target = target_of(arch)
    p = problem(shape)
    t = Tiling.of(p, config.block_m, config.block_n)
    sizes = chooser.Problem(p.n_q, p.n_kv, p.n_head, 2, 1, p.k.d, p.v.d, True, t.block_m, t.block_n)
    choice = chooser.choose(sizes, chooser.Device(132), schedule)
    none = torch.zeros(4096, dtype=torch.int32)
    plan = MaskPlan(none, none, none, none, none)
    args = portable.main_arguments(p, t, config, choice, plan, none.view(torch.float32), target)
    main = portable.main_launch(args, config, target)
    return [main] if schedule == "tile" else [main, portable.fixup_launch(args, t, p, target)]


def served(arch: str, shape: Shape, force: str) -> AttentionKernel:
    """The first kernel that serves a shape under a forced schedule."""
    p, target = problem(shape), target_of(arch)
    return next(kernel for kind in kernels_of(target) if (kernel := kind(p, target, force)).serves() is None)


def launches_for(kernel: AttentionKernel) -> list[Launch]:
    """All launches of a kernel, with a plan of its mask whose values nobody reads."""
    none = torch.zeros(4096, dtype=torch.int32)
    steps = kernel.launches(MaskPlan(none, none, none, none, none), False, Scratch("cpu"))
    return [step for step in steps if isinstance(step, Launch)]


def compiled(launch: Launch, arch: str) -> Any:
    """The kernel of a launch, compiled for an architecture with the launch's own specialization."""
    kernel, args = launch.kernel, launch.args
    options = {k: v for k, v in launch.options.items() if k in ANYWHERE or arch.startswith("sm_")}
    constants: dict[tuple[int, ...], Any] = {}
    attrs: dict[tuple[int, ...], Any] = {}
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    general = {p.name for p in kernel.params if p.do_not_specialize}

    def specialized(name: str, value: Any, path: tuple[int, ...]) -> Any:
        """What the signature says of an argument; notes constants and alignments. A named tuple of its fields."""
        if isinstance(value, tuple) and name not in fixed:
            return type(value)(*(specialized(name, x, (*path, i)) for i, x in enumerate(value)))
        kind = None if name in fixed or value is None else _kind(value)
        if kind is None or (type(value) is int and value == 1 and name not in general):
            constants[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0 and name not in general):
            attrs[path] = [["tt.divisibility", 16]]
        return kind

    signature = {name: specialized(name, args[name], (i,)) for i, name in enumerate(kernel.arg_names)}
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    if source is GluonASTSource:
        made = source(kernel, signature, {kernel.arg_names[i]: value for (i,), value in constants.items()}, attrs)
    else:
        made = source(kernel, signature, constants, attrs)
    return triton.compile(made, target=gpu_target(arch), options=options)


_POINTERS = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.uint16: "u16", torch.int8: "i8", torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


#: Options of a launch that both makers' compilers take, or AMD's alone.
ANYWHERE = ("num_warps", "maxnreg", "waves_per_eu", "matrix_instr_nonkdim")


def _kind(value: Any) -> str | None:
    """How Triton writes a value's type, None for what is a constant."""
    if isinstance(value, torch.Tensor):
        return "*" + _POINTERS[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_POINTERS[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if type(value) is int else None


def mask_launches(shape: Shape) -> list[Launch]:
    """What makes the plan of a problem's mask, for tiles of 64 rows and 64 keys."""
    p = problem(shape)
    return MaskPlans("cpu").plan(p, Tiling.of(p, 64, 64), needs_sums=True)[1]


def decode_launch(arch: str, shape: Shape, early: bool = False) -> Launch:
    """The decode kernel's launch for a shape, with as many stages as shared memory holds. early: the mask's plan is."""
    p, none = problem(shape), torch.zeros(4096, dtype=torch.int32)
    kernel = Decode(p, target_of(arch), "stream_k")
    assert kernel.serves() is None, (shape, kernel.serves())
    launch = kernel.launches(MaskPlan(none, none, none, none, none), early, Scratch("cpu"))[0]
    assert isinstance(launch, Launch)
    stages = kernel.chosen({}).stages
    options = {"num_warps": kernel.config.warps} | bounded(kernel.config)
    return Launch(launch.kernel, (1,), launch.args | {"STAGES": stages}, options)


def passes_launches(arch: str, shape: Shape, form: str) -> list[Launch]:
    """The launches of flash decoding in two passes for a shape."""
    p, none = problem(shape), torch.zeros(4096, dtype=torch.int32)
    kernel = DecodePasses(p, target_of(arch), form)
    assert kernel.serves() is None, (shape, kernel.serves())
    steps = kernel.launches(MaskPlan(none, none, none, none, none), False, Scratch("cpu"))
    return [step for step in steps if isinstance(step, Launch)]


def append_launch(arch: str, d: int, has_mask: bool) -> Launch:
    """The decode kernel's launch that rotates and writes the cache too, with as many stages as shared memory holds."""
    mask = np.zeros((1, 4096), np.float16) if has_mask else None
    found, launcher, ctx, _ = append_emulation.launcher_of(
        append_emulation.step(d, (32, 8), 4096, [5], mask=mask), arch
    )
    launcher.appended(found, ctx)  # the layer before, which sorts the mask's k-blocks
    launch = next(step for step in launcher.appended(found, ctx) if isinstance(step, Launch))
    (stages,) = {chosen.stages for chosen in launcher.chosen.values()}
    return Launch(launch.kernel, launch.grid, launch.args | {"STAGES": stages}, launch.options)


def panel_append_launches(arch: str, d: int, kinds: tuple[str, str], has_mask: bool, schedule: str) -> list[Launch]:
    """The portable kernel's launch that writes a step's row of keys in panels, of 8 heads on 2."""
    mask = np.zeros((1, 4096), np.float16) if has_mask else None
    step = panel_steps.panel_step(d, (8, 2), 4096, [5], kinds, mask)
    return [launch for launch in step.launches(target_of(arch), schedule) if launch.name == "flash_attn"]


def block_append_launches(arch: str, d: int, kinds: tuple[str, str], has_mask: bool, schedule: str) -> list[Launch]:
    """The launch that writes a step's row of a cache of blocks, of 8 heads on 2, and attends it: whose kernel it is."""
    mask = np.zeros((1, 4096), np.float16) if has_mask else None
    step = block_steps.block_step(d, (8, 2), 4096, [5], kinds, mask)
    found = step.launches(target_of(arch), schedule, BLOCK_APPEND)
    return [launch for launch in found if launch.name.startswith("flash_attn") and launch.name != "flash_attn_fixup"]


def figures(kernel: Any, arch: str) -> dict[str, Any]:
    """What is asked of a compiled kernel, by name.

    shared: bytes; registers; spills: loads and stores of spilled ones; loop_spills: of these, in innermost loops;
    unset: the first instruction that reads a uniform register before anything wrote it, "" if none does; serialized:
    what ptxas says where it makes each wgmma wait for the one before it, else ""; reused: see aot_barriers.py; plain:
    places of minima and maxima of floats that lose a NaN.
    """
    found: dict[str, Any] = {"shared": kernel.metadata.shared, "unset": "", "serialized": "", "reused": [], "plain": []}
    if not arch.startswith("sm_"):
        text = kernel.asm["amdgcn"]
        found["registers"] = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        found["spills"] = found["loop_spills"] = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])
        return found
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "-res-usage", file.name)
        # Most time goes to the disassembler: by default not for what has no stack to spill to, nor products of the kind
        # that ptxas was seen to get wrong.
        may_spill = not re.search(r"STACK:0 .*LOCAL:0 ", usage)
        wanted = COMPILE_ALL or may_spill or _multiplies_from_shared(kernel.asm["ptx"])
        sass = tool("cuobjdump", "-sass", file.name) if wanted else ""
    found["registers"] = int(re.search(r"REG:(\d+)", usage)[1])
    instructions = _instructions(sass)
    found["unset"] = read_unset([text for _, text in instructions])
    found["serialized"] = serialized(kernel.asm["ptx"])
    found["reused"] = reused_barriers(kernel.asm["ttgir"], int(arch[3:]))
    found["plain"] = plain_minima(kernel.asm["ptx"])
    found["spills"] = sum(is_spill(text) for _, text in instructions)
    found["loop_spills"] = sum(is_spill(text) for at, text in instructions if _in_inner_loop(at, instructions))
    return found


def _multiplies_from_shared(ptx: str) -> bool:
    """It has wgmma or tcgen05, whose operands' addresses are in uniform registers."""
    return "wgmma.mma_async" in ptx or "tcgen05.mma" in ptx


def serialized(ptx: str) -> str:
    """What ptxas says (C7510 to C7515) where it makes each wgmma wait for the one before it, else "".

    Of kernels that give warps work of their own, and start and wait for products themselves; plain ones are Triton's to
    arrange. Triton throws away what ptxas says, and keeps results from earlier runs, so it runs once more.
    """
    if "wgmma.mma_async" not in ptx or "setmaxnreg" not in ptx:
        return ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        said = _run("ptxas", "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull).stderr
    return next((line for line in said.splitlines() if "serialized" in line), "")


def tool(name: str, *args: str) -> str:
    """What a program of Triton's assembler prints."""
    return _run(name, *args).stdout


def _run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    path = BIN / name
    if not path.stat().st_mode & 0o111:  # some installers drop the wheel's file modes
        path.chmod(0o755)
    return subprocess.run([str(path), *args], capture_output=True, text=True, check=True, timeout=600)


def _instructions(sass: str) -> list[tuple[int, str]]:
    found = (re.match(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", line) for line in sass.splitlines())
    return [(int(m[1], 16), m[2]) for m in found if m]


def read_unset(instructions: list[str]) -> str:
    """The first instruction up to the first branch that reads a uniform register which none before it wrote, or "".

    ptxas 12.8 makes such code (configs.py). Of a matrix product's four operand registers the first two may be unused.
    """
    written: set[int] = set()
    for text in instructions:
        name, _, operands = re.sub(r"^@!?U?P\w+\s+", "", text).partition(" ")
        if name.startswith(("BRA", "BRX", "RET", "JMP")) and not text.startswith("@"):
            break
        has_result = name[0] == "U" or name.partition(".")[0] in ("S2UR", "R2UR", "LDCU", "REDUX")
        first, *others = operands.split(",") if has_result else ["", operands]
        read = {int(n) for part in others for n in re.findall(r"\bUR(\d+)\b", part)}
        if not name.startswith("HGMMA") and read - written:
            return text
        width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
        written.update(int(n) + i for n in re.findall(r"\bUR(\d+)\b", first) for i in range(width))
    return ""


def is_spill(text: str) -> bool:
    return bool(re.search(r"\b(STL|LDL)\b", text))


def _in_inner_loop(at: int, instructions: list[tuple[int, str]]) -> bool:
    """Whether an address lies in a loop that holds no other loop and multiplies, matrices or bytes."""
    return any(low <= at <= high for low, high in _inner_loops(tuple(instructions)))


_LOOPS: dict[int, list[tuple[int, int]]] = {}


def _inner_loops(instructions: tuple[tuple[int, str], ...]) -> list[tuple[int, int]]:
    key = hash(instructions)
    if key not in _LOOPS:
        jumps = [(int(m[1], 16), at) for at, text in instructions if (m := re.search(r"BRA.*?(0x[0-9a-f]+)", text))]
        loops = [(low, high) for low, high in jumps if low < high]
        inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
        _LOOPS[key] = [
            (low, high)
            for low, high in inner
            if any("MMA" in text or "IDP" in text for at, text in instructions if low <= at <= high)
        ]
    return _LOOPS[key]


def rows_of(arch: str) -> Iterator[tuple[str, Callable[[], list[Launch]]]]:
    """Every row of an architecture's table at the largest shape that it serves: a name, and what makes its launches."""
    sizes = ((64, 64), (128, 128), (256, 256), (512, 512))
    for i, row in enumerate(configs.table_of(arch)):
        kind = {"half": "f16", "f32": "f32", "quantized": "q8_0"}
        for name in row.kinds:
            d = (576, 512) if row.v_in_k else next(s for s in reversed(sizes) if s[0] <= row.d)
            shape = Shape(d, 1 if row.rows <= 16 else 64, (kind[name], kind[name]), row.v_in_k)
            if configs.find_config(arch, shape.n_q * 4, d, *shape.types, v_in_k=row.v_in_k) is not row.config:
                continue  # an earlier row takes it
            schedule = "split" if row.rows <= 16 else "stream_k"
            yield f"{arch} row {i} {shape}", partial(portable_launches, arch, shape, row.config, schedule)


def knobs_of(arch: str) -> Iterator[tuple[str, Callable[[], list[Launch]]]]:
    """What AMD's compiler can be asked for, as `graphrt tune` tries it, of the rows for heads of 128 of f16. Many of
    them spill, so they are compiled only where the word `knobs` asks for them."""
    for n_q, schedule in (1, "split"), (64, "stream_k"):
        shape = Shape((128, 128), n_q, ("f16", "f16"))
        plain = configs.find_config(arch, n_q * 4, shape.d, *shape.types)
        for size, waves, early in itertools.product((16, 32), range(5), (False, True)):
            if plain.block_m >= size:
                found = replace(plain, waves_per_eu=waves, matrix_instr_nonkdim=size, pre_load_v=early)
                name = f"{arch} knobs, queries {n_q}, instructions {size}, waves {waves}, V early {early}"
                yield name, partial(portable_launches, arch, shape, found, schedule)


#: Head sizes whose pieces are not all whole, which row of the table they have, and a mask whose rows are not aligned.
ODD = [(40, 40), (72, 72), (90, 90), (65, 67)]
DECODE = [Shape((d, d), 1, (t, t)) for d in (64, 128, 256) for t in ("f16", "q8_0", "q4_0")]
DECODE += [Shape((d, d), n_q, (k, v), runs=True) for d, n_q, k, v in (
    (128, 1, "q8_0", "q8_0"), (128, 1, "q4_0", "q4_0"), (64, 1, "q8_0", "q4_0"), (128, 3, "q4_0", "q8_0"),
)]  # fmt: skip
#: The decode kernel's, where GPUs have an instruction for them.
DECODE8 = [
    *(Shape((d, d), 1, ("f8_e4m3", "f8_e4m3")) for d in (64, 128)),
    Shape((128, 128), 1, ("f8_e4m3", "f16")),
]
#: Floats of 8 bits, whose numbers every target makes otherwise: the portable kernel, few queries and many.
FLOAT8 = [Shape((128, 128), n_q, (k, v)) for n_q in (1, 64) for k, v in (("f8_e4m3", "f8_e4m3"), ("f8_e5m2", "f16"))]
FLOAT8.append(Shape((128, 128), 64, ("f8_e4m3", "f8_e4m3"), q_type="f8_e4m3"))
PREFILL = [
    *(Shape((d, d), 128, ("f16", "f16")) for d in (64, 128, 256)),
    Shape((128, 128), 128, ("bf16", "bf16"), softcap=30.0),
    Shape((576, 512), 128, ("f16", "f16"), v_in_k=True), *(Shape((d, d), 128, ("q8_0", "q8_0")) for d in (64, 128)),
    Shape((128, 128), 128, ("q4_0", "q8_0")), *(Shape((128, 128), 128, ("f8_e4m3", "f8_e4m3"), prec=n) for n in (0, 8)),
    *(Shape((d, d), 128, ("f16", "f16"), dropout_p=0.1) for d in (64, 128, 256)),
]  # fmt: skip
#: With score functions, and their schedules.
SCORED = [
    (Shape((128, 128), 128, ("f16", "f16"), score="softcap"), "tile"),
    (Shape((128, 128), 128, ("bf16", "bf16"), score="branches"), "stream_k"),
    (Shape((64, 64), 1, ("q8_0", "q4_0"), score="branches"), "split"),
    (Shape((256, 256), 1, ("f16", "f16"), score="relative"), "split"),
]
#: Keys in panels, likewise.
PANELLED = [
    (Shape((128, 128), 1, ("f16", "f16"), panels=True), "split"),
    (Shape((128, 128), 128, ("f16", "f16"), panels=True), "stream_k"),
    (Shape((96, 96), 64, ("f8_e4m3", "f16"), panels=True), "tile"),
]
#: With the step's key written into them: head size, types, whether there is a mask, schedule.
APPENDED = [
    (128, ("f16", "f16"), True, "split"),
    (128, ("f8_e4m3", "bf16"), False, "stream_k"),
]
#: The same of caches of blocks in rows.
BLOCKS_APPENDED = [
    (128, ("q8_0", "q5_1"), True, "split"),
    (128, ("q8_0", "q8_0"), True, "split"),
    (128, ("q4_0", "q4_0"), True, "split"),
    (64, ("q8_0", "q4_0"), False, "split"),
]
#: Hopper's kernel with those, of each head size.
SCORED_HOPPER = [
    Shape((d, d), 128, (kind, kind), score=name, softcap=cap)
    for d, kind, name, cap in ((64, "f16", "branches", 0.0), (128, "f16", "relative", 0.0), (256, "bf16", "gate", 9.0))
]


def launches_of(arch: str) -> Iterator[tuple[str, Callable[[], list[Launch]]]]:
    """Everything that is compiled for an architecture: a name, and what makes its launches."""
    yield from rows_of(arch)
    for shape in FLOAT8:
        config = configs.find_config(arch, shape.n_q * 4, shape.d, *shape.types)
        how = "split" if shape.n_q == 1 else "stream_k"
        yield f"{arch} float8 {shape}", partial(portable_launches, arch, shape, config, how)
    for d in ODD if arch == "sm_90" else []:
        shape, config = Shape(d, 33, ("f16", "f16"), n_kv=257), configs.find_config(arch, 33 * 4, d, "f16", "f16")
        for how in ("tile", "stream_k"):
            yield f"{arch} odd {shape} {how}", partial(portable_launches, arch, shape, config, how)
    for shape, how in (*SCORED, *PANELLED):
        found = configs.find_config(arch, shape.n_q * 4, shape.d, *shape.types)
        yield f"{arch} of {shape} {how}", partial(portable_launches, arch, shape, found, how)
    for d, kinds, has_mask, how in APPENDED if arch == "sm_90" else APPENDED[:1]:
        name = f"{arch} panels and append, heads of {d}, {kinds[0]} and {kinds[1]}, {how}"
        yield name, partial(panel_append_launches, arch, d, kinds, has_mask, how)
    for d, kinds, has_mask, how in BLOCKS_APPENDED if arch == "sm_90" else BLOCKS_APPENDED[:2]:
        name = f"{arch} blocks and append, heads of {d}, {kinds[0]} and {kinds[1]}, {how}"
        yield name, partial(block_append_launches, arch, d, kinds, has_mask, how)
    for shape in SCORED_HOPPER if arch == "sm_90" else ():
        yield f"{arch} score {shape}", lambda s=shape: launches_for(served(arch, s, "tile"))[:1]
    if arch.startswith("sm_"):
        for shape in (*DECODE, *DECODE8) if arch != "sm_80" else [s for s in DECODE if s.d[0] < 256]:
            yield f"{arch} decode {shape}", lambda s=shape: [decode_launch(arch, s)]
        for d, form in ((64, "global-wait"), (128, "global-wait"), (128, "global-two"), (64, "partial-wait")):
            if arch == "sm_90" or form == "global-wait":
                shape = Shape((d, d), 1 if d == 128 else 4, ("f16", "f16"), n_kv=4096)
                name = f"{arch} decode in passes, {form} {shape}"
                yield name, lambda s=shape, form=form: passes_launches(arch, s, form)
        for d, has_mask in ((128, True), (64, False)):
            if arch == "sm_90" or d == 128:
                yield f"{arch} append and decode, heads of {d}", lambda d=d, m=has_mask: [append_launch(arch, d, m)]
        if arch != "sm_80":
            yield f"{arch} decode, plan early", lambda: [decode_launch(arch, DECODE[0], early=True)]
    if arch == "sm_90":
        for n_q, schedule in ((1, "split"), (6, "stream_k"), (64, "stream_k")):
            shape = Shape((576, 512), n_q, ("f16", "f16"), v_in_k=True)
            yield (
                f"{arch} shared out {schedule} {shape}",
                lambda s=shape, how=schedule: launches_for(served(arch, s, how)),
            )
        for shape in PREFILL:
            yield f"{arch} prefill {shape}", lambda s=shape: launches_for(served(arch, s, "tile"))[:-1]
        yield f"{arch} repair {PREFILL[0]}", lambda: launches_for(served(arch, PREFILL[0], "tile"))[1:]
    for shape in (Shape((128, 128), 128, ("f16", "f16")), Shape((64, 64), 1, ("f16", "f16"), n_kv=257)):
        yield f"{arch} mask {shape}", partial(mask_launches, shape)
    yield from other_ops(arch)


#: The lists of all other ops, and of each kernel every how many-th case is compiled, on sm_90 and elsewhere: all of
#: them together would take minutes more on two cores.
LISTS = {
    "aot_gemm": (1, 3), "aot_experts": (1, 3), "aot_gemv": (1, 8), "aot_rows": (2, 6), "aot_dequantize": (2, 12),
    "aot_small_ops": (2, 4), "aot_varlen": (1, 3), "aot_attention_back": (2, 8), "aot_back_hopper": (3, 1),
    "aot_backward": (2, 6),
}  # fmt: skip


def other_ops(arch: str) -> Iterator[tuple[str, Callable[[], list[Launch]]]]:
    """What the lists have for an architecture; unless GRAPHRT_AOT=all, as many as LISTS says of each kernel."""
    for module, steps in LISTS.items():
        step = 1 if COMPILE_ALL else steps[arch != "sm_90"]
        seen: Counter[str] = Counter()
        for name, kernel, args, options in import_module(module).aot_cases(arch):
            seen[kernel.__name__] += 1
            if (seen[kernel.__name__] - 1) % step == 0:
                name = name if name.startswith(arch) else f"{arch} {name}"
                yield name, lambda launch=Launch(kernel, (1,), args, options): [launch]


def shared_out(arch: str, word: str = "") -> Iterator[tuple[str, Callable[[], list[Launch]]]]:
    """Of launches_of(arch) those whose names have a word. Without one, what GRAPHRT_SHARE=k/n leaves of them: the first
    of the rows that launch the same kernels, so that every kernel is compiled on any day, and the k-th of every n."""
    k, n = shares("" if word else os.environ.get("GRAPHRT_SHARE", ""))
    seen: Counter[tuple[str, ...]] = Counter()
    for name, make in knobs_of(arch) if word == "knobs" else launches_of(arch):
        if word not in name:
            continue
        group = tuple(launch.kernel.__name__ for launch in make()) if n > 1 else ()
        if not seen[group] or seen[group] % n == k % n:
            yield name, make
        seen[group] += 1


def table_says(arch: str, name: str, launch: Launch) -> int | None:
    """Programs that a table of attention's configurations says a multiprocessor holds of a launch's kernel."""
    if launch.name.startswith("flash_attn_decode") and "passes" not in launch.name:
        of = tuple(launch.args[x] for x in ("D", "K_KIND", "V_KIND"))
        rows, runs = 8 if launch.args.get("THIN") else 16, launch.args.get("IN_RUNS", False)
        config = replace(find_decode_config(*of, rows=rows, runs=runs), stages=launch.args["STAGES"])
        return programs_held(config, shared_bytes(*of, config), arch)
    row = re.match(rf"{arch} row (\d+) ", name)
    return configs.table_of(arch)[int(row[1])].config.per_sm if row and launch.name == "flash_attn" else None


def main() -> None:
    arch, which, wanted = [*sys.argv[1:], *["0/1", ""][len(sys.argv) - 2 :]]
    if which == "list":
        print("\n".join(sorted({launch.kernel.__name__ for _, make in shared_out(arch) for launch in make()})))
        return
    part, parts = (int(n) for n in which.split("/"))
    for i, (name, make) in enumerate(shared_out(arch, wanted)):
        if i % parts == part:
            for launch in make():
                kernel = compiled(launch, arch)
                undeclared = differences(launch, kernel.asm["ttgir"], kernel.asm.get("ptx", ""))
                of = {"name": name, "kernel": launch.name, "per_sm": table_says(arch, name, launch)}
                found = figures(kernel, arch)
                held = occupancy(arch, found["registers"], found["shared"], kernel.metadata.num_warps)
                of |= {"holds": held.programs, "bound": held.bound}
                print(json.dumps({**of, **found, "undeclared": undeclared}), flush=True)


if __name__ == "__main__":
    main()
