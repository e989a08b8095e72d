"""PENALIZE and SAMPLE_EACH: the next tokens of rows of logits, each row by settings of its own.

Settings, biases, bits of allowed tokens and what was said before lie in tables with a column for each text; a row says
which column is its text's. So a batch of texts that come and go needs one graph, whatever each asks for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from graphrt.arguments import checked
from graphrt.dtypes import F32, I32
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Work, build, reduction_work, register, require
from graphrt.ops.sample import MAX_TOP_K, SampleParams
from graphrt.tensor import Tensor


@dataclass(frozen=True)
class RowSettings:
    """A column of the table of settings, in this order.

    temp: 0 or less takes the highest logit; top_k, top_p, min_keep: as in SampleParams; least: the logarithm of min_p,
    -inf for none; typical_p: the tokens whose surprise is nearest the entropy, until more than this is covered (1:
    all); xtc_probability, xtc_threshold: how often, of the tokens that are this probable, only the last stays. repeat,
    frequency, presence: penalties of the tokens that are among the last `last_n`; n_biases: how many of the column's
    biases count; masked: 1 where the column's mask does.
    """

    temp: float = 0.0
    top_k: float = 1.0
    top_p: float = 1.0
    least: float = -math.inf
    min_keep: float = 1.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    last_n: float = 0.0
    n_biases: float = 0.0
    masked: float = 0.0

    @classmethod
    def of(cls, p: SampleParams) -> RowSettings:
        """Those that draw as SAMPLE does with these parameters."""
        return cls(p.temp, p.top_k, p.top_p, math.log(p.min_p) if p.min_p > 0 else -math.inf, p.min_keep)

    @property
    def penalizes(self) -> bool:
        """Tokens that were there before are less likely, or more."""
        return self.last_n > 0 and (self.repeat, self.frequency, self.presence) != (1.0, 0.0, 0.0)

    @property
    def column(self) -> list[float]:
        """As it lies in the table: N_SETTINGS numbers."""
        found = [float(getattr(self, each.name)) for each in fields(self)]
        return found + [0.0] * (N_SETTINGS - len(found))


#: Elements of a column of settings: more than there are.
N_SETTINGS = 16
#: Which of a column's numbers is which.
(
    TEMP, TOP_K, TOP_P, LEAST, MIN_KEEP, TYPICAL_P, XTC_PROBABILITY, XTC_THRESHOLD, REPEAT, FREQUENCY, PRESENCE, LAST_N,
    N_BIASES, MASKED,
) = range(14)  # fmt: skip


@dataclass(frozen=True)
class SampleEachParams:
    """most: no row draws from more candidates than so many."""

    most: int = 64


def _check_rows(op: str, logits: Tensor, slots: Tensor, settings: Tensor) -> None:
    plain = logits.dtype.name == "f32" and logits.ne[2] == logits.ne[3] == 1 and logits.has_contiguous_rows
    require(plain, op, "the logits must be an f32 matrix with contiguous rows", logits)
    known = slots.dtype.name == "i32" and slots.ne == (logits.ne[1], 1, 1, 1)
    require(known, op, "slots must be i32, one a row of logits", slots)
    table = settings.dtype.name == "f64" and settings.ne == (N_SETTINGS, settings.ne[1], 1, 1)
    require(table, op, f"settings must be f64 [{N_SETTINGS}, slots]", settings)


def _infer_penalize(
    params: None, logits: Tensor, slots: Tensor, settings: Tensor, biased: Tensor, biases: Tensor, past: Tensor,
    n_past: Tensor, allowed: Tensor,
) -> Result:  # fmt: skip
    op, n_slots = "PENALIZE", settings.ne[1]
    _check_rows(op, logits, slots, settings)
    same = biased.ne == biases.ne and biased.ne[1:] == (n_slots, 1, 1)
    kinds = (biased.dtype.name, biases.dtype.name) == ("i32", "f64")
    require(same and kinds, op, "biased must be i32 and biases f64, both [n, slots]", biased, biases)
    require(past.dtype.name == "i32" and past.ne[1:] == (n_slots, 1, 1), op, "past must be i32 [n, slots]", past)
    known = n_past.dtype.name == "i32" and n_past.ne == slots.ne
    require(known, op, "n_past must be i32, one a row of logits", n_past)
    bits = (-(-logits.ne[0] // 32), n_slots, 1, 1)
    known = allowed.dtype.name == "i32" and allowed.ne == bits
    require(known, op, "allowed must be i32 with a bit a logit for each slot", allowed)
    tables = (slots, settings, biased, biases, past, n_past, allowed)
    require(all(t.is_contiguous for t in tables), op, "all but the logits must be contiguous", *tables)
    return Result(F32, logits.ne)


def _penalize_work(node: Tensor) -> Work:
    """As if no row changed: the logits once."""
    return Work(0, 2 * node["logits"].data_nbytes)


def _infer_each(params: SampleEachParams, logits: Tensor, uniforms: Tensor, slots: Tensor, settings: Tensor) -> Result:
    op = "SAMPLE_EACH"
    _check_rows(op, logits, slots, settings)
    known = uniforms.dtype.name == "f64" and uniforms.ne == (2, logits.ne[1], 1, 1)
    require(known, op, "there must be two numbers, f64, a row of logits", logits, uniforms)
    require(1 <= params.most <= MAX_TOP_K, op, f"most must be 1 to {MAX_TOP_K}, got {params.most}")
    tables = (uniforms, slots, settings)
    require(all(t.is_contiguous for t in tables), op, "all but the logits must be contiguous", *tables)
    return Result(I32, (logits.ne[1],))


PENALIZE = register(
    OpSpec(
        "PENALIZE", _infer_penalize, _penalize_work,
        ("logits", "slots", "settings", "biased", "biases", "past", "n_past", "allowed"), inplace=("logits",),
    )
)  # fmt: skip
SAMPLE_EACH = register(
    OpSpec(
        "SAMPLE_EACH", _infer_each, reduction_work(10), ("logits", "uniforms", "slots", "settings"),
        params=SampleEachParams,
    )
)  # fmt: skip


@checked(GraphError)
def penalize(
    logits: Tensor, slots: Tensor, settings: Tensor, biased: Tensor, biases: Tensor, past: Tensor, n_past: Tensor,
    allowed: Tensor, name: str = "",
) -> Tensor:  # fmt: skip
    """Logits as llama.cpp's samplers change them before any choice: biases, then a grammar's bits, then penalties.

    result[i, j] = logits[i, j] + its bias, in f64; -inf where the bias is, or where bit i of `allowed` is 0; and for a
    token that is there `count` times among the last `last_n` ones: x * repeat where x <= 0, else x / repeat, then less
    count * frequency + presence, each step in f32. Column slots[j] of all tables is row j's. logits: f32 [n_vocab,
    n]; slots: i32 [n]; settings: f64 [N_SETTINGS, slots], of RowSettings; biased: i32 [n_biases, slots], ids, none
    twice in a column; biases: f64, as many; past: i32 [size, slots], a text's token at position p is at p mod size;
    n_past: i32 [n], how many tokens row j's text has; allowed: i32 [ceil(n_vocab / 32), slots], bit b of word w is
    token 32 w + b. Source: llama.cpp's llama-sampler; ggml has no such op. Raises GraphError for other types, shapes.
    """
    return build(PENALIZE, logits, slots, settings, biased, biases, past, n_past, allowed, name=name)


@checked(GraphError)
def sample_each(
    logits: Tensor, uniforms: Tensor, slots: Tensor, settings: Tensor, most: int = 64, name: str = ""
) -> Tensor:
    """A token id for each row of logits, drawn as SAMPLE draws it, by settings of its own.

    result[j] = the first id whose running sum of probabilities is over uniforms[0, j], of what top_k, typical_p, top_p,
    min_p and XTC leave, in this order; XTC takes part where uniforms[1, j] is at most its probability. With temp 0 or
    less: the id of the highest logit. logits: f32 [n_vocab, n]; uniforms: f64 [2, n] in [0, 1); slots: i32 [n], the
    column of row j; settings: f64 [N_SETTINGS, slots], of RowSettings; most: the most candidates of any row, 1 to 1024,
    which a larger top_k is taken for; one under 1 is 1. The result is i32 [n]. Source: llama.cpp's llama-sampler; ggml
    has no such op. Raises GraphError for other types, shapes and parameters.
    """
    return build(SAMPLE_EACH, logits, uniforms, slots, settings, params=SampleEachParams(int(most)), name=name)
