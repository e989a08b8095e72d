"""mbarriers whose shared memory a compiled kernel also uses for something else.

The memory of an mbarrier holds nothing else until the barrier is invalidated (PTX ISA, "mbarrier"). Triton's allocator
knows no such rule: it gives the memory away once nothing uses the barrier. Where that happened, a GPU that several
processes share put the barrier's bits back over the data that lay there, at a switch between processes
(docs/mbarrier_reuse.cu, BENCHMARKS.md).
"""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import dataclass

from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptx_version_from_options

BITS = {"i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32, "f8E4M3FN": 8, "f8E5M2": 8}
ALLOCATION = re.compile(
    r"(%[\w#:]+) = ttg\.local_alloc .*?allocation\.offset = (\d+).*?!ttg\.memdesc<((?:\d+x)+)(\w+),"
)
OFFSET = re.compile(r"allocation\.offset = (\d+)")


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of shared memory; is_barrier: they hold mbarriers, which is what 64-bit integers are for."""

    name: str
    start: int
    stop: int
    is_barrier: bool


def reused_barriers(ttgir: str, capability: int) -> list[str]:
    """A sentence for each group of barriers of a kernel that is not its own memory's only user.

    ttgir: the kernel's TritonGPU IR for NVIDIA's compute capability, as 90 for 9.0.
    """
    if "ttng.init_barrier" not in ttgir:
        return []
    return overlaps(allocated(ttgir, capability))


def allocated(ttgir: str, capability: int) -> str:
    """The IR after Triton's own allocation of shared memory, which notes an offset at each operation that has some."""
    backend = CUDABackend(GPUTarget("cuda", capability, 32))
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    # As CUDABackend.make_llir begins.
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    version = get_ptx_version_from_options(options, capability)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, version)
    manager.run(module, "allocation")
    return str(module)


def overlaps(text: str) -> list[str]:
    """reused_barriers() of IR with offsets: barriers that nothing invalidates must live as long as the kernel, which
    they do when they are handed to the warps' own code, and share their bytes with nothing. Of an operation's scratch
    the IR tells only where it starts."""
    spans = [_span(found) for found in ALLOCATION.finditer(text)]
    scratch = [int(n) for n in OFFSET.findall(ALLOCATION.sub("", text))]
    found = []
    for barrier in spans:
        if not barrier.is_barrier or _is_invalidated(barrier, text):
            continue
        if not re.search(rf"ttg\.warp_specialize\([^)]*{_word(barrier.name)}", text):
            found.append(f"{barrier.name} at {barrier.start} is given up without being invalidated")
        for other in spans:
            if other is not barrier and other.start < barrier.stop and barrier.start < other.stop:
                found.append(f"{barrier.name} at {barrier.start} lies in {other.name} at {other.start}..{other.stop}")
        found += [f"{barrier.name} holds scratch at {at}" for at in scratch if barrier.start <= at < barrier.stop]
    return found


def _span(found: re.Match[str]) -> Span:
    name, offset, shape, element = found.groups()
    nbytes = math.prod(int(n) for n in shape.split("x") if n) * BITS[element] // 8
    return Span(name, int(offset), int(offset) + nbytes, element == "i64")


def _word(name: str) -> str:
    """A pattern for a value's name and no longer one."""
    return re.escape(name) + r"(?![\w#])"


def _is_invalidated(group: Span, text: str) -> bool:
    """Each barrier of a group is: the group itself where it is one barrier, else as many views of it as it has."""
    views = re.findall(rf"(%[\w#:]+) = ttg\.memdesc_index {_word(group.name)}", text)
    ended = [view for view in [group.name, *views] if re.search(rf"ttng\.inval_barrier {_word(view)}", text)]
    return group.name in ended or len(ended) >= (group.stop - group.start) // 8
