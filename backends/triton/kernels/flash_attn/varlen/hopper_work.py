"""Which tiles and k-blocks a program of Hopper's varlen kernels visits: hopper/work.py for the list of tile_list.py.

The first tiles of the list, as many as make whole rounds of all programs, go whole to one program each, tile i of a
round to the i-th (every other round backwards): so neighbours, which share a sequence's keys, are worked on at the same
time and find them in the L2 cache. The units of the others, one to two rounds, are shared out equally (stream-K).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from graphrt.backends.triton.kernels.flash_attn.gluon_ranges import part_of_tile, planned, slot_of_part, tile_units
from graphrt.backends.triton.kernels.flash_attn.gluon_visits import page_of, spanned_block, visited_span
from graphrt.backends.triton.kernels.flash_attn.varlen.tile_list import RECORD

#: The numbers among the kernels' arguments, in their order, which compiled code does not depend on.
NUMBERS = (
    "scale", "softcap", "sq_t", "sq_h", "so_t", "so_h", "n_head", "gqa", "n_groups", "n_tiles", "n_seq", "n_pages",
    "max_blocks", "s_table", "window", "splits",
)  # fmt: skip
POINTERS = ("q", "out", "lse", "slopes", "sinks", "tiles", "table", "unit_start", "part")
OF_PROGRAM = ("whole_rounds", "first_tile", "first_unit", "stop_unit", "turns")


@aggregate
class VarlenWork:
    """A varlen kernel's run-time arguments; what hopper/work.py's Work is to the code that both have in common.

    A tile's sequence is a record as tile_list.py's tile_record has it. whole_rounds: tiles that the program has whole;
    then it has tiles from first_tile on, units first_unit .. stop_unit - 1 of all of them; turns: tiles that it has
    anything of.
    """

    q: gl.tensor
    out: gl.tensor
    lse: gl.tensor | gl.constexpr
    slopes: gl.tensor | gl.constexpr
    sinks: gl.tensor | gl.constexpr
    tiles: gl.tensor
    table: gl.tensor | gl.constexpr
    unit_start: gl.tensor
    part: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor
    sq_t: gl.tensor
    sq_h: gl.tensor
    so_t: gl.tensor
    so_h: gl.tensor
    n_head: gl.tensor
    gqa: gl.tensor
    n_groups: gl.tensor
    n_tiles: gl.tensor
    n_seq: gl.tensor
    n_pages: gl.tensor
    max_blocks: gl.tensor
    s_table: gl.tensor
    window: gl.tensor
    splits: gl.tensor
    whole_rounds: gl.tensor
    first_tile: gl.tensor
    first_unit: gl.tensor
    stop_unit: gl.tensor
    turns: gl.tensor
    score: gl.tensor | gl.constexpr
    spec: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, spec, *arguments, score=None):
        """arguments: POINTERS, NUMBERS, OF_PROGRAM; score: numbers of spec.score."""
        self.score = gl.constexpr(None) if score is None else score
        self.spec = gl.constexpr(spec)
        for name, value in zip((*POINTERS, *NUMBERS, *OF_PROGRAM), arguments):
            setattr(self, name, gl.constexpr(None) if value is None else value)

    @gluon.jit
    def rounds(self):
        """How many tiles this program takes."""
        return self.turns

    @gluon.jit
    def tile(self, turn):
        """The record of the sequence, group of heads and number of this program's turn-th tile."""
        pid = gl.program_id(0)
        programs = gl.num_programs(0)
        place = gl.where((turn & 1) == 1, programs - 1 - pid, pid)
        tile = gl.where(turn < self.whole_rounds, turn * programs + place, self.first_tile + turn - self.whole_rounds)
        i_qt = tile // self.n_groups
        p = self.tiles + RECORD * i_qt
        record = (
            planned(p), planned(p + 1), planned(p + 2), planned(p + 3), planned(p + 4), planned(p + 5), planned(p + 6),
            planned(p + 7),
        )  # fmt: skip
        return record, tile - i_qt * self.n_groups, tile

    @gluon.jit
    def span(self, seq):
        """visited_span() of a tile."""
        _i_seq, _q_first, n, row0, length, _k_first, behind, skip = seq
        return visited_span(
            row0, n, length, behind, skip, self.window, self.spec.pack, self.spec.block_m, self.spec.block_n,
            self.spec.causal, self.spec.window, self.spec.has_alibi,
        )  # fmt: skip

    @gluon.jit
    def units(self, tile, n_units):
        """Of a tile's units those that the program has: the first, the end, whether that is all, their part's slot."""
        low = tile * 0
        high = n_units
        whole = low == 0
        slot = low
        if tile >= self.whole_rounds * gl.num_programs(0):
            start, n = tile_units(tile, self.unit_start, 0, self.unit_start, False, False)
            # The program's range counted from the tile's start; before its first tile it may begin earlier.
            first = gl.maximum(self.first_unit - start, 0)
            low, high, finishes, whole = part_of_tile(0, n, first, self.stop_unit - start)
            slot = slot_of_part(gl.program_id(0), self.splits, finishes)
        return low, high, whole, slot

    @gluon.jit
    def visits(self, seq, group, tile):
        """Of the k-blocks that the program visits of a tile: how many are seen whole, how many there are, and what
        block() and the masks need: (number of the first, span, the first query's position)."""
        first, full_first, full_end, end, first_key, end_key = self.span(seq)
        n_units = gl.maximum(end - first, 1)
        low, high, _whole, _slot = self.units(tile, n_units)
        n_all = gl.maximum(gl.minimum(high, n_units) - low, 0)
        if self.spec.visits_one:  # of a tile without any, one that is hidden
            n_all = gl.maximum(n_all, 1)
        n_full = gl.minimum(gl.maximum(full_end - full_first - low, 0), n_all)
        return n_full, n_all, (low, first, full_first, full_end, first_key, end_key, seq[6])

    @gluon.jit
    def segment(self, turn, n_all):
        """Of this program's turn-th tile: its blocks' first and end, as visits() counts them, whether that is all of
        it, its part's slot."""
        seq, _group, tile = self.tile(turn)
        first, _full_first, _full_end, end, _first_key, _end_key = self.span(seq)
        _low, _high, whole, slot = self.units(tile, gl.maximum(end - first, 1))
        return 0, n_all, whole, slot

    @gluon.jit
    def block(self, start, j):
        """The j-th k-block that is visited. start: of visits()."""
        low, first, full_first, full_end, _first_key, _end_key, _behind = start
        return spanned_block(low + j, first, full_first, full_end)

    @gluon.jit
    def block_ahead(self, start, j):
        """The same for a j that may be one past the last block."""
        return self.block(start, j)

    @gluon.jit
    def has_unseen(self, block, start):
        """Whether no row of the tile sees some key of a block."""
        _low, _first, _full_first, _full_end, first_key, end_key, _behind = start
        begin = block * self.spec.block_n
        return (begin < first_key) | (begin + self.spec.block_n > end_key)

    @gluon.jit
    def place(self, seq, block, row: gl.constexpr):
        """(page, row in it) of a k-block's keys from the row-th on, or (0, row) of packed ones."""
        key = block * self.spec.block_n + row
        if self.spec.page == 0:
            return key * 0, seq[5] + key
        else:
            p_table = self.table + gl.minimum(seq[0], self.n_seq - 1).to(gl.int64) * self.s_table
            page = page_of(p_table, key // self.spec.page, self.n_pages, self.max_blocks)
            return page, key % self.spec.page

    @gluon.jit
    def scored_rows(self, seq, group, token, start, layout: gl.constexpr):
        """Sequence, and head and position [64, 1] of a warpgroup's rows, as score functions count them."""
        row = gl.arange(0, 64, layout)
        head = group * self.spec.pack + row % self.spec.pack
        return seq[0], head[:, None], (seq[6] + token + row // self.spec.pack)[:, None]

    @gluon.jit
    def n_queries(self, seq):
        """Queries of a sequence."""
        return seq[2]

    @gluon.jit
    def q_of(self, seq):
        """Where a sequence's queries begin."""
        return self.q + seq[1].to(gl.int64) * self.sq_t * self.spec.q_vec

    @gluon.jit
    def out_of(self, seq):
        """Where a sequence's results begin."""
        return self.out + seq[1].to(gl.int64) * self.so_t * self.spec.q_vec

    @gluon.jit
    def lse_of(self, seq):
        """Where the logarithms of a sequence's denominators begin, [queries, n_head]."""
        return self.lse + seq[1].to(gl.int64) * self.n_head

    @gluon.jit
    def sinks_of(self, seq, values):
        """The sinks of a sequence's rows; queries of nobody have none."""
        return gl.where(seq[0] < self.n_seq, values, float("-inf"))

    @gluon.jit
    def slot_memory(self, slot, d: gl.constexpr):
        """A slot of scratch: f32 sums [block_m, d], row maxima and sums of weights [block_m]."""
        return self.part + slot.to(gl.int64) * (self.spec.block_m * (d + 2))

    @gluon.jit
    def first_token(self, seq, tile, wg: gl.constexpr):
        """The token, of the sequence's queries, of a warpgroup's first row, where `pack` divides 64."""
        return (seq[3] + 64 * wg) // self.spec.pack

    @gluon.jit
    def rows(self, seq, group, tile, n: gl.constexpr, layout: gl.constexpr):
        """Token and head of each of the tile's first n rows, for any `pack`."""
        row = seq[3] + gl.arange(0, n, layout)
        token = row // self.spec.pack
        return token, group * self.spec.pack + (row - token * self.spec.pack)
