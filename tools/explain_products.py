"""Of a matrix product: how its weights lie, and why it takes the way it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphrt.backends.triton import TritonBackend
from graphrt.backends.triton.packing import PackedBuffer, packing_of
from graphrt.execute import Executable
from graphrt.tools.explain_steps import Step


@dataclass(frozen=True)
class WeightInfo:
    """name; kind: its type; rows, k; planes: of packed weights, "" for others: as in the file; nbytes: in memory."""

    name: str
    kind: str
    rows: int
    k: int
    planes: str
    nbytes: int

    @property
    def bytes_per_element(self) -> float:
        return self.nbytes / (self.rows * self.k)


def weights_of(step: Step, exe: Executable) -> list[WeightInfo]:
    """The matrices that a step's products multiply with."""
    found = []
    for node in step.nodes:
        w = node.src[0]
        if node.op == "MUL_MAT" and w is not None:
            buffer = exe.place(w)[0]
            packed = isinstance(buffer, PackedBuffer)
            nbytes = buffer.footprint if packed else w.nbytes
            planes = _planes(w.dtype.name) if packed else ""
            found.append(WeightInfo(w.name, w.dtype.name, w.n_elements // w.ne[0], w.ne[0], planes, nbytes))
    return found


def _planes(kind: str) -> str:
    """What planes a packed type has."""
    p = packing_of(kind)
    assert p is not None
    scale = str(p.scale_type).removeprefix("torch.")
    parts = [f"{p.bits}-bit codes"]
    parts += [f"{p.high_bits} high bit{'s' * (p.high_bits > 1)}"] if p.high_bits else []
    parts += [f"{p.scales} {scale} scale{'s' * (p.scales > 1)} of 32 elements"]
    parts += [f"{p.supers} float16 of 256"] if p.supers else []
    return ", ".join(parts)


def reasons(step: Step) -> Iterator[str]:
    """Why a product of the GPU backend takes the way that its launches tell, from the ways' own limits."""
    from graphrt.backends.triton.kernels.mul_mat import activations, batch, gemv, lower

    node = next(n for n in step.nodes if n.op == "MUL_MAT")
    w, x = node.src[0], node.src[1]
    assert w is not None and x is not None
    b, names = lower.batch_of(w, x.ne), {launch.kernel for launch in step.launches}
    is_packed = packing_of(w.dtype.name) is not None
    tokens = f"{b.tokens} token{'s' * (b.tokens != 1)}" + (f" for each of {b.count} matrices" if b.count > 1 else "")
    of_one, of_heads = names & {"packed_gemv", "dense_gemv"}, names & {"packed_head_gemv", "plain_head_gemv"}
    if of_one or of_heads:
        parts = "in two parts of" if activations.parts_of(w.ne[0]) == 2 else "to"
        how = f"dp4a on activations rounded {parts} 8 bits" if is_packed else "weights as they are"
        yield f"{tokens}: up to {gemv.MAX_TOKENS} take {'gemv.py' if of_one else 'heads.py'}, {how}"
        return
    yield f"{tokens}: gemv.py {_why_not_gemv(step, b.tokens, b.count, is_packed)}"
    if "batch_wgmma" in names:
        yield f"up to {batch.MAX_TOKENS} tokens on Hopper: batch_wgmma.py, weights dequantized in registers for wgmma"
    elif "batch_mma" in names:
        yield f"up to {batch.MAX_TOKENS} tokens on NVIDIA: batch_mma.py, weights dequantized on their way"
    elif names & {"gemm_packed", "gemm_plain"}:
        limit = lower.GEMM_TOKENS["f32" if w.dtype.name == "f32" else "packed" if is_packed else "plain"]
        yield f"up to {limit} tokens: gemm.py; batch_mma.py {_why_not_batch(step, is_packed)}"
    else:
        before = "weights dequantized to scratch in each run, then " if w.dtype.is_quantized else ""
        in_place = b.count > 1 and lower.takes_gemm(w, b.tokens)
        why = "results written in place" if in_place else "more tokens than batch_mma.py and gemm.py take"
        yield f"{why}: dense.py, {before}the vendor's product{' of all matrices' * ('multiply_each' in names)}"


def _why_not_gemv(step: Step, tokens: int, count: int, is_packed: bool) -> str:
    from graphrt.backends.triton.kernels.mul_mat import gemv

    if tokens > gemv.MAX_TOKENS:
        return f"takes up to {gemv.MAX_TOKENS}"
    if count > 1:
        return "takes one matrix"
    if is_packed and isinstance(step.backend, TritonBackend) and step.backend.exact:
        return "rounds activations to 8 bits, and results are to be exact"
    return "does not take these types and strides"


def _why_not_batch(step: Step, is_packed: bool) -> str:
    from graphrt.backends.triton.kernels.mul_mat import batch

    if isinstance(step.backend, TritonBackend) and not step.backend.target.is_nvidia:
        return "is NVIDIA's"
    if not is_packed:
        return "takes packed weights"
    return f"takes one matrix of {', '.join(batch.KINDS)} whose rows are whole steps"
