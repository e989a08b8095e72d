"""Which tiles and blocks a program of Hopper's kernels for gradients of packed sequences has: what backward_work.py's
GradientWork is to the code that both have in common."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from graphrt.backends.triton.kernels.flash_attn.gluon_ranges import planned
from graphrt.backends.triton.kernels.flash_attn.gluon_visits import spanned_block, visited_span
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_sight import seeing_span
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_work import LISTED, GradientWork
from graphrt.backends.triton.kernels.flash_attn.varlen.tile_list import RECORD

#: The numbers among the kernels' arguments, in their order, which compiled code does not depend on.
NUMBERS = ("scale", "softcap", "n_head", "gqa", "n_tiles", "padded", "n_rows", "window", "section")
#: What a PackedWork is made of.
ARGUMENTS = ("rows", "tiles", "slopes", "scales", *NUMBERS)


@aggregate
class PackedWork:
    """A kernel's run-time arguments.

    rows: f32 [n_head, 2, padded], of slots, see backward_packing.py; tiles: its ordered list, n_tiles records, of keys
    or of queries; n_rows: of all sequences, keys or queries as well; section: heads whose programs run side by side.
    The rest as GradientWork has it.
    """

    rows: gl.tensor
    tiles: gl.tensor
    slopes: gl.tensor | gl.constexpr
    scales: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor
    n_head: gl.tensor
    gqa: gl.tensor
    n_tiles: gl.tensor
    padded: gl.tensor
    n_rows: gl.tensor
    window: gl.tensor
    section: gl.tensor
    spec: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, spec, *arguments):
        """arguments: ARGUMENTS."""
        self.spec = gl.constexpr(spec)
        for name, value in zip(ARGUMENTS, arguments):
            setattr(self, name, gl.constexpr(None) if value is None else value)

    place = GradientWork.place
    mask_factor = GradientWork.mask_factor
    ratio = GradientWork.ratio
    unscaled_weights = GradientWork.unscaled_weights
    unscaled_scores = GradientWork.unscaled_scores

    @gluon.jit
    def tile(self):
        """(head of K and V or of Q, record of the tile) of the program."""
        head, i = self.place(self.n_tiles)
        p = self.tiles + RECORD * i
        record = (
            planned(p), planned(p + 1), planned(p + 2), planned(p + 3), planned(p + 4), planned(p + 5), planned(p + 6),
            planned(p + 7),
        )  # fmt: skip
        return head, record

    @gluon.jit
    def seen_by(self, record):
        """Of a tile of keys: seeing_span()."""
        _seq, _first, n, key0, n_queries, _others_first, behind, _slot = record
        return seeing_span(key0, n, n_queries, behind, self.window, self.spec)

    @gluon.jit
    def step_of(self, span, i):
        """The first query, counted in its sequence, of the i-th step of a tile of keys."""
        first, full_first, full_end, _end = span
        return spanned_block(i, first, full_first, full_end) * self.spec.block_m

    @gluon.jit
    def visits(self, record):
        """Of a tile of queries: what masks.hide_unseen() and clear_unseen() ask, and the end of its blocks."""
        _seq, _first, n, row0, length, _others_first, behind, _slot = record
        first, full_first, full_end, end, first_key, end_key = visited_span(
            row0, n, length, behind, 0, self.window, 1, LISTED, self.spec.block_n, self.spec.causal, self.spec.window,
            self.spec.has_alibi,
        )  # fmt: skip
        return (0, first, full_first, full_end, first_key, end_key, behind), end

    @gluon.jit
    def block_of(self, visits, j):
        """The j-th block of keys that a tile of queries visits."""
        _low, first, full_first, full_end, _first_key, _end_key, _behind = visits
        return spanned_block(j, first, full_first, full_end)

    @gluon.jit
    def rows_of(self, head, slot):
        """Where lse of a head's queries of a sequence begins, and how far behind it delta does."""
        return self.rows + head.to(gl.int64) * (2 * self.padded) + slot * LISTED, self.padded
