"""The Hopper kernels' online softmax: row maxima, one step, and what holds the assembler to its order."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.common.constants import LN2

# Below every score that a finite f16 product can give, and finite: see half.py's docstring.
NO_MAX = gl.constexpr(-1.0e30)


@gluon.jit
def reciprocal(x):
    """1 / x, one instruction: within an ulp, and 0 for infinity."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def together(m):
    """Returns m, row maxima not below NO_MAX, with each of a thread's two rows made to need the other.

    Left alone, the assembler finishes the exponentials of one row before it starts on the maximum of the other, and
    waits for the two chains of dependent maxima and shuffles in turn.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 low;
        min.f32 low, $3, 0fF149F2CA;
        max.f32 $0, $2, low;
        min.f32 low, $2, 0fF149F2CA;
        max.f32 $1, $3, low;
        }""",
        "=&r,=&r,r,r",
        [m],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def settle(den):
    """Returns den, a row sum of softmax weights, and keeps the assembler from moving a later wait above what den needs.

    wgmma waits have no operands, so that the assembler would lift the wait for O += P V to right before the softmax
    that is to run beside it. It keeps barrier operations in order, hence one that needs den and, den not being
    negative, never happens.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred never;
        .reg .f32 both;
        .reg .u32 nowhere;
        add.f32 both, $2, $3;
        setp.lt.f32 never, both, 0fBF800000;
        mov.u32 nowhere, 0;
        @never mbarrier.arrive.shared::cta.b64 _, [nowhere];
        mov.b32 $0, $2;
        mov.b32 $1, $3;
        }""",
        "=r,=r,r,r",
        [den],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def halve(s, rows: gl.constexpr, cols: gl.constexpr):
    """The elementwise maximum of the left and the right half of the columns, which a thread holds both of."""
    left, right = s.reshape([rows, 2, cols // 2]).permute((0, 2, 1)).split()
    return gl.maximum(left, right)


@gluon.jit
def row_maximum(s):
    """Maximum of each row. By halves, as most of it is then independent work, where a reduction is one long chain."""
    rows: gl.constexpr = s.shape[0]
    cols: gl.constexpr = s.shape[1]
    quarter = halve(halve(s, rows, cols), rows, cols // 2)
    return gl.convert_layout(gl.max(quarter, 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def row_size(s):
    """Largest absolute value of each row, in as many instructions as the maximum."""
    rows: gl.constexpr = s.shape[0]
    cols: gl.constexpr = s.shape[1]
    left, right = s.reshape([rows, 2, cols // 2]).permute((0, 2, 1)).split()
    sizes = gl.inline_asm_elementwise(
        "{ .reg .f32 a, b; abs.f32 a, $1; abs.f32 b, $2; max.f32 $0, a, b; }",
        "=r,r,r",
        [left, right],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    return gl.convert_layout(row_maximum(sizes), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def softmax_step(p, s, m, den, factor, by_row: gl.constexpr = False):
    """One online-softmax step: the weights of this block, and the running maximum, sum and the rescaling of what was
    summed before. Scores are s * factor, a number or (by_row) one for each row."""
    m_new = together(gl.maximum(m, row_maximum(s) * factor))
    if by_row:
        s = s * factor[:, None]
    else:
        s = s * factor
    weights = gl.exp2(s - m_new[:, None])
    decay = gl.exp2(m - m_new)
    return weights, decay, m_new, den * decay + gl.sum(weights, 1)


@gluon.jit
def with_sink(m, den, sink):
    """(m, den, what earlier sums are multiplied by) of a row with a sink, a score in log2 units without a value."""
    m_new = gl.maximum(m, sink)
    shrink = gl.exp2(m - m_new)
    return m_new, den * shrink + gl.exp2(sink - m_new), shrink


@gluon.jit
def natural_lse(m, den):
    """The natural logarithm of a row's denominator."""
    return (m + gl.log2(den)) * LN2


@gluon.jit
def not_finite(values):
    """Of each row whether it holds NaN or infinity."""
    # 0 * x is 0 for every finite x and NaN otherwise.
    return gl.sum(values * 0.0, 1) != 0.0
