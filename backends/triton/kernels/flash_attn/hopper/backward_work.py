"""Which tiles, blocks and rows a program of Hopper's kernels for attention's gradients has."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from graphrt.backends.triton.kernels.common.constants import LOG2E
from graphrt.backends.triton.kernels.flash_attn.gluon_visits import block_in_range, listed_block, mask_tile
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_specs import PLAN_QUERIES

#: The numbers among the kernels' arguments, in their order, which compiled code does not depend on.
NUMBERS = (
    "scale", "softcap", "sm_t", "sm_h", "sm_s", "mask_heads", "mask_seqs", "mask_groups", "n_seq", "n_head", "gqa",
    "n_q", "n_kv", "section", "first_head", "inverse",
)  # fmt: skip
#: What a GradientWork is made of.
ARGUMENTS = ("rows", "mask", "counts", "blocks", "seen", "slopes", "scales", "kept", *NUMBERS)
#: Queries of a block in lists.
LISTED = gl.constexpr(PLAN_QUERIES)


@aggregate
class GradientWork:
    """A kernel's run-time arguments. Strides of the mask are in units of spec.mask_vec; unused pointers are None.

    rows: f32 [n_seq, n_head, 2, padded n_q], see backward_rows.py. counts, blocks: int32, of each list how many full
    and partial blocks it has, and these; in kernels of queries a mask's plan (mask_plan.py), in kernels of keys its
    columns (backward/plans.py). seen: the plan's. slopes: f32 [n_head]. scales: f32 [2], the factors of
    d_out as it is read and of dS. first_head: the launch has heads of Q from there on, of all sequences', with the KV
    heads that these share. kept: dropout's bits (dropout_bits.py), by key in kernels of keys, else by query;
    inverse: what kept weights are multiplied with.
    """

    rows: gl.tensor | gl.constexpr
    mask: gl.tensor | gl.constexpr
    counts: gl.tensor | gl.constexpr
    blocks: gl.tensor | gl.constexpr
    seen: gl.tensor | gl.constexpr
    slopes: gl.tensor | gl.constexpr
    scales: gl.tensor
    kept: gl.tensor | gl.constexpr
    scale: gl.tensor
    softcap: gl.tensor
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
    first_head: gl.tensor
    inverse: gl.tensor
    spec: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, spec, *arguments):
        """arguments: ARGUMENTS."""
        self.spec = gl.constexpr(spec)
        for name, value in zip(ARGUMENTS, arguments):
            setattr(self, name, gl.constexpr(None) if value is None else value)

    @gluon.jit
    def query_blocks(self):
        """Blocks of queries of a head."""
        return gl.cdiv(self.n_q, LISTED)

    @gluon.jit
    def key_blocks(self):
        """Blocks of keys."""
        return gl.cdiv(self.n_kv, self.spec.block_n)

    @gluon.jit
    def place(self, n):
        """(head of the launch, its tile) of a program, each head having n tiles: `section` heads at a time, all first
        tiles of these, then all second ones."""
        i = gl.program_id(0)
        first = i // (n * self.section) * self.section
        rest = i - first * n
        width = gl.minimum(self.section, gl.num_programs(0) // n - first)
        tile = rest // width
        return first + rest - tile * width, tile

    @gluon.jit
    def scores_block(self, seq, head, block):
        """Which piece of stored gradients of scores a block of queries of a head has: those of the launch's first head
        come first."""
        return (seq * self.n_head + head - self.first_head) * self.query_blocks() + block

    @gluon.jit
    def key_tile(self):
        """(sequence, KV head, block of keys) of a program that owns keys. Of a causal mask the first ones, which most
        queries see, come first."""
        heads = self.n_head // self.gqa
        head, block = self.place(self.key_blocks())
        head += self.first_head // self.gqa
        return head // heads, head % heads, block

    @gluon.jit
    def query_tile(self):
        """(sequence, head, block of queries) of a program that owns queries. Those that see most of a causal mask's
        keys come first."""
        n = self.query_blocks()
        head, block = self.place(n)
        head += self.first_head
        return head // self.n_head, head % self.n_head, n - 1 - block

    @gluon.jit
    def query_visits(self, seq, head, block):
        """How many blocks of queries a block of keys visits without mask work, and in all, and where their list is."""
        if self.spec.has_mask:
            at = mask_tile(seq, head, block, self.key_blocks(), self.mask_groups, self.mask_seqs)
            n_full = gl.load(self.counts + 2 * at)
            return n_full, n_full + gl.load(self.counts + 2 * at + 1), at.to(gl.int64) * self.query_blocks()
        return self.query_blocks(), self.query_blocks(), gl.to_tensor(0).to(gl.int64)

    @gluon.jit
    def first_query(self, start, i):
        """The first query of the i-th step of a list of blocks of queries, which have one step or several."""
        steps: gl.constexpr = LISTED // self.spec.block_m
        block = i // steps
        if self.spec.has_mask:
            block = block_in_range(listed_block(self.blocks + start, block), self.query_blocks())
        return block * LISTED + i % steps * self.spec.block_m

    @gluon.jit
    def key_visits(self, seq, head, qt):
        """How many blocks of keys a block of queries visits without mask work, in all, its list and its seen keys.
        Without a mask, the last block counts as one with mask work where keys end inside it."""
        if self.spec.has_mask:
            at = mask_tile(seq, head, qt, self.query_blocks(), self.mask_groups, self.mask_seqs)
            n_full = gl.load(self.counts + 2 * at)
            return n_full, n_full + gl.load(self.counts + 2 * at + 1), at.to(gl.int64) * self.key_blocks()
        return self.n_kv // self.spec.block_n, self.key_blocks(), gl.to_tensor(0).to(gl.int64)

    @gluon.jit
    def key_block(self, start, j):
        """The j-th block of keys that a block of queries visits."""
        if self.spec.has_mask:
            return block_in_range(listed_block(self.blocks + start, j), self.key_blocks())
        return j

    @gluon.jit
    def rows_of(self, seq, head):
        """Where lse of a head's queries begins, and how far behind it delta does."""
        padded = self.query_blocks() * LISTED
        return self.rows + (seq * self.n_head + head).to(gl.int64) * (2 * padded), padded

    @gluon.jit
    def mask_factor(self, head):
        """What the mask's values are multiplied by, in log2 units."""
        if self.spec.has_alibi:
            return gl.load(self.slopes + head) * LOG2E
        else:
            return gl.to_tensor(1.0) * LOG2E

    @gluon.jit
    def ratio(self):
        """What products of d_out and V are multiplied by, on the way to dS."""
        ratio = gl.load(self.scales + 1) / gl.load(self.scales) * self.spec.weight
        if self.spec.has_dropout:
            ratio = ratio * self.inverse
        return ratio

    @gluon.jit
    def unscaled_weights(self):
        """What sums of weights times d_out are multiplied by at the end."""
        factor = self.spec.weight / gl.load(self.scales)
        if self.spec.has_dropout:
            factor = factor * self.inverse
        return factor

    @gluon.jit
    def unscaled_scores(self):
        """What sums of dS times q or k are multiplied by at the end."""
        return self.scale / gl.load(self.scales + 1)
