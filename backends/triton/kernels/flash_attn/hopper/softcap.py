"""The soft cap of scores: two polynomials and an exact form for tanh, and which of them serves."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.common.constants import LOG2E
from graphrt.backends.triton.kernels.flash_attn.hopper.softmax import NO_MAX, reciprocal, row_size

# Odd polynomials for tanh(x): where |x| <= SHORT_RANGE to 2.7e-6, where |x| <= LONG_RANGE to 1.1e-6. Both keep falling
# below, to minus infinity.
SHORT_RANGE = gl.constexpr(0.45)
SHORT_TANH = gl.constexpr((0.99995852, -0.33165442, 0.11609694))
LONG_RANGE = gl.constexpr(0.9)
LONG_TANH = gl.constexpr((0.999986742, -0.332987063, 0.130767856, -0.045938528, 0.00984349093))
# 1 - tanh(x)^2, of x^2, to SHORT_RANGE, to 8.0e-5: a sixth of what f16 rounds.
SHORT_SLOPE = gl.constexpr((0.99992, -0.99264072, 0.56506034))
# Their tanh at the end of their range, and so many log2 units below a row's maximum what they have wrong further down
# is less than f16's rounding of a weight: the short one's error is still small where its range ends.
SHORT_LAST, SHORT_BELOW = gl.constexpr(0.42189901), gl.constexpr(13.8)
LONG_LAST, LONG_BELOW = gl.constexpr(0.7162978701990245), gl.constexpr(24.0)
# Which form of the soft cap a warp takes, see cap_level.
SHORT, LONG, EXACT = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
LARGE_CAP = 28.0  # soft caps from here on: see cap_level


def from_end(coefficients):
    """Coefficients of the same polynomial of x^2 - SHORT_RANGE^2, which is negative where it serves."""
    c0, c1, c2 = coefficients.value
    end = SHORT_RANGE.value**2
    return gl.constexpr((c0 + c1 * end + c2 * end * end, c1 + 2.0 * c2 * end, c2))


TANH_FROM_END, SLOPE_FROM_END = from_end(SHORT_TANH), from_end(SHORT_SLOPE)


@gluon.constexpr_function
def capped_lines(form, result, score, shift, constants):
    """PTX for result = a raw score soft-capped + shift. constants: scale / softcap, softcap in the wanted units, and
    the coefficients of the short form, into which both are multiplied."""
    ratio, cap, *first = constants
    if form == SHORT:
        return [
            f"mul.f32 a, {score}, {score};",
            f"fma.rn.f32 b, a, {first[2]}, {first[1]};",
            f"fma.rn.f32 b, a, b, {first[0]};",
            f"fma.rn.f32 {result}, {score}, b, {shift};",
        ]
    lines = [f"mul.f32 x, {score}, {ratio};"]
    if form == LONG:
        last, *others = reversed(LONG_TANH.value)
        lines += ["mul.f32 a, x, x;", f"mov.f32 b, {last};", *(f"fma.rn.f32 b, a, b, {c};" for c in others)]
        lines += ["mul.f32 x, x, b;"]
    else:  # tanh(x) = 1 - 2 / (exp(2x) + 1): right at both ends, where exp2 is 0 or infinite
        lines += [f"mul.f32 x, x, {2.0 * LOG2E.value};", "ex2.approx.ftz.f32 x, x;", "add.f32 x, x, 1.0;"]
        lines += ["rcp.approx.ftz.f32 x, x;", "fma.rn.f32 x, x, -2.0, 1.0;"]
    return [*lines, f"fma.rn.f32 {result}, x, {cap}, {shift};"]


@gluon.constexpr_function
def by_level(level, make, aside=()):
    """PTX that runs make(form) of the form that `level`, the same for a whole warp, says. aside: PTX that none of them
    runs into; it ends where they end."""
    lines = ["{", ".reg .pred p, never;", ".reg .f32 a, b, x;"]
    lines += [f"setp.ne.s32 p, {level}, 0;", "@p bra.uni FAR;", *make(SHORT), "bra.uni DONE;", "FAR:"]
    lines += [f"setp.ne.s32 p, {level}, 1;", "@p bra.uni FARTHER;", *make(LONG), "bra.uni DONE;", "FARTHER:"]
    return "\n".join([*lines, *make(EXACT), "bra.uni DONE;", *aside, "DONE:", "}"])


@gluon.constexpr_function
def capped_asm(n):
    """PTX of `capped` for n elements. Operands: the results, then n of each argument."""

    def lines(form):
        constants = [f"${n * i}" for i in range(4, 9)]
        return [x for k in range(n) for x in capped_lines(form, f"${k}", f"${n + k}", f"${2 * n + k}", constants)]

    return by_level(f"${3 * n}", lines)


@gluon.constexpr_function
def inside_line(inside, score, end):
    """PTX for `inside`, the short form's argument: its sign bit is set where that form serves, and of no NaN."""
    return f"fma.rn.f32 {inside}, {score}, {score}, {end};"


@gluon.constexpr_function
def sloped_lines(form, operands, constants):
    """PTX for (result, slope) of (a raw score, shift, inside): soft-capped plus shift, and 1 - tanh^2. constants: of
    cap_slope_constants(), but for the third."""
    result, slope, score, shift, inside = operands
    ratio, cap, c0, c1, c2, d1, d2 = constants
    if form == SHORT:
        return [
            f"fma.rn.f32 b, {inside}, {c2}, {c1};",
            f"fma.rn.f32 b, {inside}, b, {c0};",
            f"fma.rn.f32 {result}, {score}, b, {shift};",
            f"fma.rn.f32 b, {inside}, {d2}, {d1};",
            f"fma.rn.f32 {slope}, {inside}, b, {SLOPE_FROM_END.value[0]};",
        ]
    lines = capped_lines(EXACT, result, score, shift, [ratio, cap, "", "", ""])
    return [*lines, "neg.f32 a, x;", f"fma.rn.f32 {slope}, a, x, 1.0;"]


@gluon.constexpr_function
def sloped_asm(n):
    """PTX of `capped_with_slope` for n elements. Operands: the results, their slopes, then n of each argument.

    Two forms: one more would be in the way of the assembler more than it spares. A warp takes the exact one if a score
    is out of the short one's range, which the sign bits say, two in an instruction, where a maximum takes one for each.
    To take the short one first, and the exact one again where it has to be, spilled in blocks with masks.
    """
    at = [[f"${n * i + k}" for i in range(12)] for k in range(n)]
    inside = [f"in{k}" for k in range(n)]

    def lines(form):
        return [x for a, name in zip(at, inside) for x in sloped_lines(form, [*a[:4], name], [*a[4:6], *a[7:12]])]

    found = ["{", ".reg .pred p;", f".reg .f32 a, b, x, {', '.join(inside)};", ".reg .b32 all, next;"]
    found += [inside_line(name, a[2], a[6]) for a, name in zip(at, inside)]
    found += ["mov.b32 all, in0;"]
    found += [x for name in inside[1:] for x in (f"mov.b32 next, {name};", "and.b32 all, all, next;")]
    found += ["setp.ge.s32 p, all, 0;", "vote.sync.any.pred p, p, 0xffffffff;", "@p bra.uni FAR;"]
    return "\n".join([*found, *lines(SHORT), "bra.uni DONE;", "FAR:", *lines(EXACT), "DONE:", "}"])


@gluon.constexpr_function
def capped_weights_asm(n):
    """PTX of `capped_weights` for n pairs. Operands: low, high and total, then n of each argument.

    The special function unit takes longest: it should be busy from the first pairs on, while the multiply-adds of the
    next ones run. The assembler would put most of those first. It moves nothing past a branch behind which what is to
    be moved is used on both sides; so there are branches, never taken, to places that use it (and give NaN).
    """
    chunk = 4
    constants = [f"${n * i}" for i in range(7, 12)]

    def exponents(form, pairs):
        shift = [f"${5 * n + k}" for k in range(n)]
        both = [(n * half + k, n * (3 + half) + k, k) for k in pairs for half in (0, 1)]
        return [x for to, score, k in both for x in capped_lines(form, f"${to}", f"${score}", shift[k], constants)]

    def lines(form):
        chunks = [list(range(at, min(at + chunk, n))) for at in range(0, n, chunk)]
        found, aside = exponents(form, chunks[0]), []
        name = "NEVER_SHORT" if form == SHORT else "NEVER_LONG"
        for i, pairs in enumerate(chunks):
            before = chunks[i - 1] if i > 0 else []
            if form != EXACT and before:
                found += [f"setp.gt.f32 never, ${pairs[-1]}, 1.0e30;", f"@never bra.uni {name}_{i};"]
                aside += [f"{name}_{i}:", "mov.f32 x, 0f7F800000;"]
                aside += [f"mul.f32 x, x, ${half + k};" for k in before for half in (0, n)] + ["bra.uni NEVER;"]
            for k in pairs:
                found += [f"ex2.approx.ftz.f32 ${k}, ${k};", f"ex2.approx.ftz.f32 ${n + k}, ${n + k};"]
            found += exponents(form, chunks[i + 1]) if i + 1 < len(chunks) else []
            found += [f"add.f32 ${2 * n + k}, ${k}, ${n + k};" for k in before]
        return [*found, *(f"add.f32 ${2 * n + k}, ${k}, ${n + k};" for k in chunks[-1]), "bra.uni DONE;", *aside]

    return by_level(f"${6 * n}", lines, ["NEVER:", *(f"mov.f32 ${k}, x;" for k in range(3 * n))])


@gluon.constexpr_function
def asm_operands(outputs, inputs):
    return ",".join(["=&r"] * outputs + ["r"] * inputs)


@gluon.jit
def cap_constants(p, unit: gl.constexpr):
    """What capped_lines takes, for capped scores in units of 1 / unit."""
    ratio = p.scale / p.softcap
    cap = p.softcap * unit
    square = ratio * ratio
    first = cap * ratio
    return ratio, cap, SHORT_TANH[0] * first, SHORT_TANH[1] * first * square, SHORT_TANH[2] * first * (square * square)


@gluon.jit
def capped(p, s, shift, level, unit: gl.constexpr, pack: gl.constexpr):
    """Raw scores soft-capped, times unit, plus shift. level: see cap_level."""
    ratio, cap, c0, c1, c2 = cap_constants(p, unit)
    source: gl.constexpr = capped_asm(pack)
    return gl.inline_asm_elementwise(
        source,
        asm_operands(pack, 8 * pack),
        [s, shift, level, ratio, cap, c0, c1, c2],
        dtype=gl.float32,
        is_pure=True,
        pack=pack,
    )


@gluon.jit
def cap_slope_constants(p):
    """scale / softcap, softcap in log2 units, what a raw score's square is less at the end of the short form's range,
    and that form's coefficients, for the result and for the slope but for the last."""
    ratio = p.scale / p.softcap
    cap = p.softcap * LOG2E
    square = ratio * ratio
    first = cap * ratio
    # Further out the highest coefficient nears the smallest numbers.
    reach = p.softcap / p.scale * SHORT_RANGE
    end = gl.where(gl.abs(reach) < 4000.0, -reach * reach, 1.0)
    return (
        ratio, cap, end, TANH_FROM_END[0] * first, TANH_FROM_END[1] * first * square,
        TANH_FROM_END[2] * first * (square * square), SLOPE_FROM_END[1] * square, SLOPE_FROM_END[2] * square * square,
    )  # fmt: skip


@gluon.jit
def capped_with_slope(p, s, shift):
    """(raw scores soft-capped, in log2 units, plus shift; 1 - tanh^2, the soft cap's slope)."""
    ratio, cap, end, c0, c1, c2, d1, d2 = cap_slope_constants(p)
    pack: gl.constexpr = 16  # elements of a thread between two branches
    source: gl.constexpr = sloped_asm(pack)
    return gl.inline_asm_elementwise(
        source,
        asm_operands(2 * pack, 10 * pack),
        [s, shift, ratio, cap, end, c0, c1, c2, d1, d2],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=pack,
    )


@gluon.jit
def capped_weights(p, s, m, level):
    """(low, high, total): 2 to the power of soft-capped scores less m, of even and of odd columns, and low + high. In
    one piece, since the assembler does not mix what lies on two sides of a branch."""
    rows: gl.constexpr = s.shape[0]
    cols: gl.constexpr = s.shape[1]
    low, high = s.reshape([rows, cols // 2, 2]).split()
    row_layout: gl.constexpr = gl.SliceLayout(1, low.type.layout)
    m = gl.convert_layout(m, row_layout, assert_trivial=True)
    level = gl.convert_layout(level, row_layout, assert_trivial=True)
    ratio, cap, c0, c1, c2 = cap_constants(p, LOG2E)
    n: gl.constexpr = cols // 4
    source: gl.constexpr = capped_weights_asm(n)
    return gl.inline_asm_elementwise(
        source,
        asm_operands(3 * n, 9 * n),
        [low, high, -m[:, None], level[:, None], ratio, cap, c0, c1, c2],
        dtype=(gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=n,
    )


@gluon.jit
def largest_of_warp(x):
    """The largest of an int32 [64] of row values, for each warp that of its own rows."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 both;
        max.s32 both, $2, $3;
        redux.sync.max.s32 $0, both, 0xffffffff;
        mov.b32 $1, $0;
        }""",
        "=&r,=&r,r,r",
        [x],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def cap_level(p, s, m, top, both_sides: gl.constexpr):
    """Which form of the soft cap serves for a block's raw scores, by warps.

    A polynomial does not above its range; below, it gives too little, which does no harm where that is negligible
    beside the row's maximum: `m` of the blocks before in log2 units, or `top` of this one's raw scores. both_sides:
    only where nothing lies below its range; m and top are of no use.
    """
    reach = p.softcap / p.scale
    short = reach * SHORT_RANGE
    # Past this the highest coefficient nears the smallest numbers.
    short = gl.where(short < 4000.0, short, -1.0)
    long = reach * LONG_RANGE
    if both_sides:
        largest = row_size(s)
        level = gl.where(largest <= short, SHORT, gl.where(largest <= long, LONG, EXACT))
    else:
        # |tanh(x)| <= |x|: a negative maximum is at least this when capped.
        least = gl.maximum(m, top * (p.scale * LOG2E))
        is_short = (top <= short) & (least >= floor_of(p, SHORT_BELOW, SHORT_LAST))
        is_long = (top <= long) & (least >= floor_of(p, LONG_BELOW, LONG_LAST))
        level = gl.where(is_short, SHORT, gl.where(is_long, LONG, EXACT))
    return largest_of_warp(level)


@gluon.jit
def floor_of(p, below: gl.constexpr, last: gl.constexpr):
    """The least row maximum, not positive, beside which a polynomial's errors below its range are negligible."""
    floor = below - p.softcap * (LOG2E * last)
    return gl.where(floor <= 0.0, floor, -NO_MAX)


@gluon.jit
def exactly_capped(p, s, unit: gl.constexpr):
    """Raw scores soft-capped, times unit, by the exact form alone."""
    # tanh(x) = 1 - 2 / (exp(2x) + 1): right at both ends, where exp2 is 0 or infinite.
    e = gl.exp2(s * (p.scale / p.softcap * (2.0 * LOG2E)))
    cap = p.softcap * unit
    return cap - (2.0 * cap) * reciprocal(e + 1.0)


@gluon.jit
def capped_scores(p, s, bias, at_once: gl.constexpr):
    """Raw scores soft-capped, plus bias. at_once: elements of a thread between two branches."""
    if p.spec.k_kind == "":
        return capped(p, s, bias, cap_level(p, s, 0.0, 0.0, True)[:, None], 1.0, at_once)
    else:
        # Beside producers that unpack K and V, consumers have too few registers for more than the exact form.
        return exactly_capped(p, s, 1.0) + bias
