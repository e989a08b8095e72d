"""hopper.py's configurations, the problems that it serves and its launch; what of them other Hopper kernels share."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.flash_attn.hopper import hopper_flash_attn_kernel
from graphrt.backends.triton.kernels.flash_attn.hopper_softcap import LARGE_CAP

# Of hopper.py's kernel; it stands here because that file has the kernel alone.
accesses(reads="q k_desc v_desc mask counts blocks slopes sinks mask_desc", writes="out bad lse")(
    hopper_flash_attn_kernel
)
WG_ROWS = 64  # the M of one wgmma instruction: query rows of one consumer warpgroup
MAX_SHARED_BYTES = 232448  # of one thread block on sm_90
L2_SECTION_BYTES = 32 << 20  # K and V of the heads that run side by side should stay within this much of the L2 cache


@dataclass(frozen=True)
class Config:
    """How the work is cut up; every field is a compile-time constant of the kernel.

    block_n: keys of one block (64 or 128).
    stages: buffers in each of the K and V rings.
    n_wg: consumer warpgroups (2 or 3).
    pingpong: the warpgroups take turns at issuing their products.
    persistent: one program per multiprocessor walks several tiles, and the producer runs ahead into the next one.
    """

    block_n: int
    stages: int
    n_wg: int = 2
    pingpong: bool = False
    persistent: bool = True

    @property
    def block_m(self) -> int:
        """Query rows of one tile."""
        return WG_ROWS * self.n_wg


@dataclass(frozen=True)
class Spec:
    """The kernel's compile-time choices: the configuration and which of the optional features are on."""

    d: int
    block_n: int
    stages: int
    n_wg: int
    pingpong: bool
    persistent: bool
    reversed_order: bool
    q_vec: int  # strides of q and out come in units of this many elements (4 or 1), which lets loads be 16 bytes wide
    has_mask: bool
    mask_vec: int  # the same for the mask's strides (8 or 1)
    has_softcap: bool
    has_alibi: bool
    has_sinks: bool
    has_bad: bool
    has_lse: bool
    # Quantized types whose order of elements (see slot_elements) the columns of the query tile and of the output have.
    k_kind: str = ""
    v_kind: str = ""
    pack: int = 1  # heads whose rows share a tile: row r is token r // pack of head r % pack (1, 2, 4 or 8)
    mask_stages: int = 0  # buffers of the ring through which TMA brings the mask; 0: consumers load it themselves
    # A row's largest score alone tells which form of the soft cap serves (see cap_level); False: the least does too.
    large_cap: bool = False


#: By head size. The fastest of those tried on an H100; see BENCHMARKS.md.
DEFAULTS: dict[int, Config] = {
    64: Config(block_n=128, stages=2, n_wg=2, pingpong=True),
    128: Config(block_n=128, stages=2, n_wg=2, persistent=False),
    256: Config(block_n=64, stages=2, n_wg=2, persistent=False),
}
#: Fewer queries than this leave most of a tile empty.
MIN_QUERIES = 48


def config_for(p: Any) -> Config | str:
    """The config for a problem (problem.py's Problem), else a reason why this kernel does not serve it."""
    k, v = p.k_t, p.v_t
    if p.out is None or v is None:
        return "the log-sum-exp alone is the portable kernel's"
    if k.dtype is not v.dtype or k.dtype.name not in ("f16", "bf16"):
        return f"K and V must both be f16 or both bf16, they are {k.dtype.name} and {v.dtype.name}"
    if k.ne[0] != v.ne[0] or k.ne[0] not in DEFAULTS:
        return f"heads must be of {', '.join(map(str, DEFAULTS))}, they are of {k.ne[0]} and {v.ne[0]}"
    if p.n_q < MIN_QUERIES:
        return f"it takes {MIN_QUERIES} queries or more, here {p.n_q}"
    if p.params.scale < 0:
        return f"the scale must not be negative, it is {p.params.scale:g}"
    # TMA takes addresses and strides of whole 16 bytes.
    if any(n % 16 for t in (k, v) for n in (*t.nb[1:], p.place(t)[1])):
        return "addresses and strides of K and V must be whole 16 bytes"
    return DEFAULTS[k.ne[0]]


def shared_bytes(d: int, config: Config) -> int:
    """Shared memory of one program: the queries, both rings, and some room for barriers and the compiler's own use."""
    return 2 * d * (config.block_m + 2 * config.stages * config.block_n) + 1024


def registers_at_start(config: Config) -> int:
    """Registers of a thread at launch, before setmaxnreg: an even share of the file, the producer's group included."""
    return 65536 // (128 * (config.n_wg + 1)) // 8 * 8


def strides_in(unit: int, tensor: torch.Tensor, dims: tuple[int, ...]) -> list[int]:
    """Strides of some dimensions in units of `unit` elements; a dimension of size 1 has none."""
    return [tensor.stride(i) // unit if tensor.shape[i] > 1 else 0 for i in dims]


def aligned(tensor: torch.Tensor, unit: int) -> bool:
    """Whether every row of `unit` elements along the last dimension starts at a multiple of its own size."""
    rows = range(tensor.dim() - 1)
    return tensor.data_ptr() % (unit * tensor.element_size()) == 0 and all(
        tensor.shape[i] == 1 or tensor.stride(i) % unit == 0 for i in rows
    )


def box_descriptor(tensor: torch.Tensor, rows: int, cols: int, idle: int) -> TensorDescriptor:
    """TMA descriptor of a 16-bit tensor [n0, n1, n2, n3] in boxes of [1, 1, rows, cols]; what lies outside reads as 0.

    idle: the stride of a dimension of size 1. It means nothing, but TMA wants whole 16 bytes there too.
    """
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    shape = list(tensor.shape)
    strides = [tensor.stride(i) if shape[i] > 1 else idle for i in range(3)] + [1]
    return TensorDescriptor(tensor, shape, strides, [1, 1, rows, cols], layout)


def mask_fits_ring(mask: torch.Tensor, pack: int) -> bool:
    """Whether TMA can bring the mask: rows of whole 16 bytes, and the heads of a tile share them."""
    return aligned(mask, 8) and mask.stride(3) == 1 and (pack == 1 or mask.shape[1] == 1)


def mask_ring_stages(d: int, config: Config, pack: int) -> int:
    """Buffers of the mask's ring that fit beside the rest, at most two."""
    left = MAX_SHARED_BYTES - shared_bytes(d, config)
    return min(2, left // (2 * config.block_m // pack * config.block_n))


def side_by_side(kv_head_bytes: int, per_kv_head: int, most: int, ordered: bool) -> int:
    """How many groups of heads run at the same time: those of one kv head where tiles are equally long, else as many as
    keep K and V (of kv_head_bytes) within the L2 cache, so that there are enough tiles of one length to go round."""
    if not ordered:
        return per_kv_head
    return min(most, per_kv_head * max(1, L2_SECTION_BYTES // kv_head_bytes))


def launch_integers(
    q: torch.Tensor,
    out: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    class_heads: int,
    gqa: int,
    n_kv: int,
    section: int,
) -> tuple[int, int, list[int]]:
    """(q_vec, mask_vec, integers): units of strides, see Spec, and the kernels' INTEGER_ARGUMENTS in their order."""
    n_seq, n_head, n_q, _ = q.shape
    q_vec = 4 if aligned(q, 4) and aligned(out, 4) else 1
    mask_vec, mask_strides, mask_dims = 1, [0, 0, 0], [1, 1]
    if mask is not None:
        mask_vec = 8 if aligned(mask, 8) else 1
        mask_strides, mask_dims = strides_in(mask_vec, mask, (2, 1, 0)), [mask.shape[1], mask.shape[0]]
    strides = [*strides_in(q_vec, q, (2, 1, 0)), *strides_in(q_vec, out, (1, 2, 0)), *mask_strides]
    return q_vec, mask_vec, [*strides, *mask_dims, class_heads, n_seq, n_head, gqa, n_q, n_kv, section]


def hopper_flash_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    mask: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bad: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    config: Config | None = None,
    pack: int = 1,
    mask_stages: int | None = None,
) -> None:
    """out = softmax(scale * q k^T (soft-capped) + slope * mask) v, for every sequence and head.

    q: f32 [n_seq, n_head, n_q, d], any strides but the last, which is 1; d is 64, 128 or 256.
    k, v: f16 or bf16 [n_seq, n_head_kv, n_kv, d], strides of whole 16 bytes. Head h reads kv head
      h // (n_head / n_head_kv).
    out: f32 [n_seq, n_q, n_head, d], written; any strides but the last.
    scale: not negative. softcap: 0 for none.
    mask: f16 [m3, m2, n_q, n_kv], last stride 1; sequence s and head h use mask[s % m3, h % m2]. -inf hides a key
      (see `bad` for scores of NaN). With it come the classes of its blocks of (config.block_m, config.block_n), for
      each of the m3 * MG * ceil(n_q / block_m) query tiles, MG being m2 or 1: counts int32 [tiles, 2], how many key
      blocks hold only zeros (full) and how many are visited besides (partial); blocks int32 [tiles,
      ceil(n_kv / block_n)], their indices, the full ones first. A block that reaches past n_kv is never full.
    slopes: f32 [n_head], ALiBi factors of the mask. sinks: f32 [n_head], a score that joins each row's denominator.
    bad: int32 [n_seq * n_head * ceil(n_q / block_m)], written: 0, or not 0 where a tile should be
      done again: its output holds NaN or infinity (K and V may hold such values in rows that the mask hides; the
      softmax and the products here let them through), or its logits are so large that their rounding shows.
    lse: f32 [n_seq, n_q, n_head] contiguous, written: the natural logarithm of each row's denominator.
    pack: heads whose rows share a tile (see Spec), a divisor of n_head / n_head_kv among 1, 2, 4, 8. The tiles of the
      mask's classes and of `bad` are then those of n_head / pack groups with n_q * pack rows: MG is 1 or n_head / pack.
    mask_stages: of the mask's ring, 0 for none; by default as many as fit (at most 2) where mask_fits_ring.
    A row whose keys are all hidden gives 0.
    """
    n_seq, n_head, n_q, d = q.shape
    n_kv = k.shape[2]
    config = config or DEFAULTS[d]
    if k.shape != v.shape or k.dtype != v.dtype or k.dtype not in (torch.float16, torch.bfloat16) or k.shape[3] != d:
        raise ValueError(f"k and v must share a 16-bit type and a shape: {k.dtype} {k.shape} and {v.dtype} {v.shape}")
    if pack not in (1, 2, 4, 8) or n_head // k.shape[1] % pack:
        raise ValueError(f"{n_head // k.shape[1]} query heads of a kv head cannot be packed by {pack}")
    if scale < 0:
        raise ValueError(f"scale must not be negative, got {scale}")
    if shared_bytes(d, config) > MAX_SHARED_BYTES:
        raise ValueError(f"{config} needs {shared_bytes(d, config)} bytes of shared memory at d = {d}")
    tiles_of_group = triton.cdiv(n_q * pack, config.block_m)
    groups = n_head // pack
    class_heads = 1
    if mask is not None:
        assert counts is not None and blocks is not None, "a mask comes with the classes of its blocks"
        class_heads = counts.shape[0] // (mask.shape[0] * tiles_of_group)
        if mask_stages is None:
            mask_stages = mask_ring_stages(d, config, pack) if mask_fits_ring(mask, pack) else 0
    ordered = mask is not None
    gqa = n_head // k.shape[1]
    section = side_by_side(4 * d * n_kv, gqa, n_seq * n_head, ordered) // pack
    q_vec, mask_vec, integers = launch_integers(
        q, out, mask, class_heads=class_heads, gqa=gqa, n_kv=n_kv, section=section
    )
    tiles = tiles_of_group * groups * n_seq
    mask_stages = mask_stages or 0
    spec = Spec(
        d=d,
        block_n=config.block_n,
        stages=config.stages,
        n_wg=config.n_wg,
        pingpong=config.pingpong,
        persistent=config.persistent,
        reversed_order=ordered,
        q_vec=q_vec,
        has_mask=mask is not None,
        mask_vec=mask_vec,
        has_softcap=softcap != 0.0,
        has_alibi=slopes is not None,
        has_sinks=sinks is not None,
        has_bad=bad is not None,
        has_lse=lse is not None,
        pack=pack,
        mask_stages=mask_stages,
        large_cap=softcap >= LARGE_CAP,
    )
    programs = programs_of(tiles, config.persistent, multiprocessors(q.device))
    hopper_flash_attn_kernel[(programs,)](
        q,
        box_descriptor(k, config.block_n, d, idle=d),
        box_descriptor(v, config.block_n, d, idle=d),
        out,
        mask,
        counts,
        blocks,
        slopes,
        sinks,
        bad,
        lse,
        float(scale),
        float(softcap),
        *integers,
        spec,
        box_descriptor(mask, WG_ROWS // pack, config.block_n, idle=8) if mask is not None and mask_stages else None,
        num_warps=4,
        maxnreg=registers_at_start(config),
    )


def programs_of(tiles: int, persistent: bool, sm_count: int) -> int:
    """Programs of a launch that does not share tiles out: one a tile, or of persistent ones one a multiprocessor."""
    return min(tiles, sm_count) if persistent else tiles


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
