"""Which tiles and k-blocks a program of Hopper's kernels visits, and the arguments that say so."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from graphrt.backends.triton.kernels.flash_attn.gluon_ranges import part_of_tile, slot_of_part, tile_units
from graphrt.backends.triton.kernels.flash_attn.gluon_visits import block_in_range, first_row, listed_block, mask_tile

#: The numbers among the kernels' arguments, in their order, which compiled code does not depend on.
NUMBERS = (
    "scale", "softcap", "sq_t", "sq_h", "sq_s", "so_t", "so_h", "so_s", "sm_t", "sm_h", "sm_s", "mask_heads",
    "mask_seqs", "mask_groups", "n_seq", "n_head", "gqa", "n_q", "n_kv", "section",
)  # fmt: skip
#: What a Work is made of: arguments that all kernels have, then those of tiles that programs share.
ARGUMENTS = ("q", "out", "mask", "counts", "blocks", "slopes", "sinks", "bad", "lse", *NUMBERS)
OF_RANGES = ("part", "seen", "unit_start", "splits", "first_tile", "first_unit", "stop_unit", "turns")


@aggregate
class Work:
    """A kernel's run-time arguments. Strides are in elements (see Spec for their units); unused pointers are None.

    part to turns: of kernels whose programs share tiles (Spec.ranges), else None. first_tile, first_unit, stop_unit:
    the program's range (gluon_ranges.program_range); turns: tiles that it has units of.
    kept, inverse: dropout's bits by query (dropout_bits.py), and what kept weights are multiplied with; else None.
    score: numbers of spec.score.
    """

    q: gl.tensor
    out: gl.tensor
    mask: gl.tensor | gl.constexpr
    counts: gl.tensor | gl.constexpr
    blocks: gl.tensor | gl.constexpr
    slopes: gl.tensor | gl.constexpr
    sinks: gl.tensor | gl.constexpr
    bad: gl.tensor | gl.constexpr
    lse: gl.tensor | gl.constexpr
    scale: gl.tensor
    softcap: gl.tensor
    sq_t: gl.tensor
    sq_h: gl.tensor
    sq_s: gl.tensor
    so_t: gl.tensor
    so_h: gl.tensor
    so_s: gl.tensor
    sm_t: gl.tensor
    sm_h: gl.tensor
    sm_s: gl.tensor
    mask_heads: gl.tensor
    mask_seqs: gl.tensor
    mask_groups: gl.tensor
    n_seq: gl.tensor
    n_head: gl.tensor
    gqa: gl.tensor
    n_q: gl.tensor
    n_kv: gl.tensor
    section: gl.tensor
    part: gl.tensor | gl.constexpr
    seen: gl.tensor | gl.constexpr
    unit_start: gl.tensor | gl.constexpr
    splits: gl.tensor | gl.constexpr
    first_tile: gl.tensor | gl.constexpr
    first_unit: gl.tensor | gl.constexpr
    stop_unit: gl.tensor | gl.constexpr
    turns: gl.tensor | gl.constexpr
    kept: gl.tensor | gl.constexpr
    inverse: gl.tensor | gl.constexpr
    score: gl.tensor | gl.constexpr
    spec: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, spec, *arguments, kept=None, inverse=None, score=None):
        """arguments: ARGUMENTS, and OF_RANGES if spec.ranges."""
        self.spec = gl.constexpr(spec)
        given = dict(zip((*ARGUMENTS, *OF_RANGES), arguments)) | {"kept": kept, "inverse": inverse, "score": score}
        for name in (*ARGUMENTS, *OF_RANGES, "kept", "inverse", "score"):
            value = given.get(name)
            setattr(self, name, gl.constexpr(None) if value is None else value)

    @gluon.jit
    def query_tiles(self):
        """Tiles of one group of heads (of one head, where they are not packed)."""
        return gl.cdiv(self.n_q * self.spec.pack, self.spec.block_m)

    @gluon.jit
    def groups(self):
        """Groups of heads of one sequence that share tiles."""
        return self.n_head // self.spec.pack

    @gluon.jit
    def key_blocks(self):
        """Blocks of keys if a mask hides none."""
        return gl.cdiv(self.n_kv, self.spec.block_n)

    @gluon.jit
    def rounds(self):
        """How many tiles this program takes."""
        if self.spec.ranges:
            return self.turns
        if not self.spec.persistent:
            return 1
        tiles = self.query_tiles() * self.groups() * self.n_seq
        width = gl.num_programs(0)
        whole = tiles // width
        return whole + (self.place(whole) < tiles - whole * width).to(gl.int32)

    @gluon.jit
    def place(self, turn):
        """This program's place among the tiles of one round. Every other round runs backwards: tiles are ordered by
        length, and a program that got the longest of one round gets the shortest of the next."""
        pid = gl.program_id(0)
        return gl.where((turn & 1) == 1, gl.num_programs(0) - 1 - pid, pid)

    @gluon.jit
    def tile(self, turn):
        """Sequence, group of heads and query tile of this program's turn-th tile.

        Groups are cut into sections whose K and V fit the L2 cache; within a section the tiles of one query position
        are neighbours, and with a mask the last positions, which under a causal mask are the longest, come first.
        """
        n_qt = self.query_tiles()
        if self.spec.ranges:
            n_groups = self.groups()
            i = self.first_tile + turn
            i_head = i // n_qt
            i_seq = i_head // n_groups
            return i_seq, i_head - i_seq * n_groups, i - i_head * n_qt
        rank = turn * gl.num_programs(0) + self.place(turn)
        part = rank // (n_qt * self.section)
        first = part * self.section
        rest = rank - first * n_qt
        width = gl.minimum(self.section, self.n_seq * self.groups() - first)
        row = rest // width
        index = first + rest - row * width
        seq = index // self.groups()
        qt = row
        if self.spec.reversed_order:
            qt = n_qt - 1 - row
        return seq, index - seq * self.groups(), qt

    @gluon.jit
    def visits(self, seq, group, qt):
        """How many blocks the tile visits without and with mask work, and where its list of blocks starts."""
        if self.spec.has_mask:
            mt = mask_tile(seq, group, qt, self.query_tiles(), self.mask_groups, self.mask_seqs)
            n_full = gl.load(self.counts + 2 * mt)
            n_all = n_full + gl.load(self.counts + 2 * mt + 1)
            if self.spec.visits_one:
                # A tile without any block still runs one, the first listed or block 0: its mask hides every score.
                n_all = gl.maximum(n_all, 1)
            start = mt.to(gl.int64) * self.key_blocks()
        else:
            n_full = self.n_kv // self.spec.block_n
            n_all = self.key_blocks()
            start = gl.to_tensor(0).to(gl.int64)
        return n_full, n_all, start

    @gluon.jit
    def listed(self, start, j):
        """The j-th entry of a tile's list of blocks as it stands there; for j past its end anything."""
        if self.spec.has_mask:
            return listed_block(self.blocks + start, j)
        return j

    @gluon.jit
    def block(self, start, j):
        """Index of the j-th block that a tile visits. The list's tail past its counts is never used as an address."""
        if self.spec.has_mask:
            return block_in_range(self.listed(start, j), self.key_blocks())
        return j

    @gluon.jit
    def block_ahead(self, start, j):
        """The same for a j that may be one past the last block of all."""
        if self.spec.has_mask:
            return self.block(start, gl.minimum(j, self.key_blocks() - 1))
        return j

    @gluon.jit
    def first_row(self, block):
        """The row of K and V in memory at which a block begins."""
        return first_row(block, self.spec.block_n)

    @gluon.jit
    def segment(self, turn, n_all):
        """Of this program's turn-th tile: its blocks' first and end, whether that is all of it, its part's slot."""
        start, n_units = tile_units(
            self.first_tile + turn, self.counts, self.key_blocks(), self.unit_start, self.spec.has_mask,
            self.spec.uniform,
        )  # fmt: skip
        # The program's range counted from the tile's start; before its first tile it may begin earlier.
        first = gl.maximum(self.first_unit - start, 0)
        low, high, finishes, whole = part_of_tile(0, n_units, first, self.stop_unit - start)
        return low, gl.minimum(high, n_all), whole, slot_of_part(gl.program_id(0), self.splits, finishes)

    @gluon.jit
    def slot_memory(self, slot, d: gl.constexpr):
        """A slot of scratch: f32 sums [block_m, d], row maxima and sums of weights [block_m]."""
        return self.part + slot.to(gl.int64) * (self.spec.block_m * (d + 2))

    @gluon.jit
    def scored_rows(self, seq, group, token, start, layout: gl.constexpr):
        """Sequence, and head and query [64, 1] of a warpgroup's rows, as score functions count them."""
        row = gl.arange(0, 64, layout)
        head = group * self.spec.pack + row % self.spec.pack
        return seq, head[:, None], (token + row // self.spec.pack)[:, None]

    @gluon.jit
    def n_queries(self, seq):
        """Queries of a sequence."""
        return self.n_q

    @gluon.jit
    def q_of(self, seq):
        """Where a sequence's queries begin."""
        return self.q + seq.to(gl.int64) * self.sq_s * self.spec.q_vec

    @gluon.jit
    def out_of(self, seq):
        """Where a sequence's results begin."""
        return self.out + seq.to(gl.int64) * self.so_s * self.spec.q_vec

    @gluon.jit
    def lse_of(self, seq):
        """Where the logarithms of a sequence's denominators begin, [n_q, n_head]."""
        return self.lse + seq.to(gl.int64) * self.n_q * self.n_head

    @gluon.jit
    def sinks_of(self, seq, values):
        """The sinks of a sequence's rows, from those of their heads."""
        return values

    @gluon.jit
    def first_token(self, seq, qt, wg: gl.constexpr):
        """The token of a warpgroup's first row, where `pack` divides 64."""
        return (qt * self.spec.n_wg + wg) * (64 // self.spec.pack)

    @gluon.jit
    def rows(self, seq, group, qt, n: gl.constexpr, layout: gl.constexpr):
        """Token and head of each of the tile's first n rows, for any `pack`."""
        row = qt * self.spec.block_m + gl.arange(0, n, layout)
        token = row // self.spec.pack
        return token, group * self.spec.pack + (row - token * self.spec.pack)
