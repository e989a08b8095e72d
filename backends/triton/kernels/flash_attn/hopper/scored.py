# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""Softmax weights of scores that a score function bends (gluon_score.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.common.constants import LN2, LOG2E
from graphrt.backends.triton.kernels.flash_attn.hopper.masks import hide, hide_past_end, hide_unseen, key_columns
from graphrt.backends.triton.kernels.flash_attn.hopper.softcap import capped_scores
from graphrt.backends.triton.kernels.flash_attn.hopper.softmax import softmax_step


@gluon.jit
def rows_of_score(p, seq, group, token, start, layout: gl.constexpr):
    """What the score function has of a warpgroup's rows, once a tile; 0 without one."""
    if p.spec.score is None:
        return 0
    else:
        b, h, i = p.scored_rows(seq, group, token, start, layout)
        return p.spec.score_rows(b, h, i, p.score)


@gluon.jit
def weigh_scored(p, s, m, den, mask, block, slope, rows, partial: gl.constexpr):
    """consumer.py's weigh() with a score function. slope: in log2 units, a number or one for each row; rows: of
    rows_of_score."""
    by_row: gl.constexpr = p.spec.has_alibi and p.spec.pack > 1
    if p.spec.has_softcap:
        s = capped_scores(p, s, 0.0, 8)
    else:
        s = s * p.scale
    s = p.spec.score(s, key_columns(p, block)[None, :], rows)
    if partial:
        away = slope * LN2
        if by_row:
            away = away[:, None]
        if p.spec.varlen:
            s = hide_unseen(p, s, block, mask, away)
        elif p.spec.has_mask:
            bias = mask.to(gl.float32)
            if p.spec.has_alibi:
                bias = bias * away
            s = hide_past_end(p, s + bias, block)
        else:
            s = hide(p, s, block)
    return softmax_step(p, s, m, den, LOG2E)
