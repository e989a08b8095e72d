"""SamplerParams: how tokens are chosen, with llama.cpp's names and defaults, checked."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn, ParamSpec, TypedDict, TypeVar

from graphrt.errors import SessionError
from graphrt.printing import brief

_MAX_SEED = (1 << 64) - 1
#: The most characters that a sequence breaker of DRY may have, as in llama.cpp.
MAX_BREAKER = 40

#: Numbers with bounds: the least and the most.
_BOUNDS: dict[str, tuple[float, float]] = {
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "repeat_last_n": (-1, math.inf),
    "presence_penalty": (-1e6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "dry_multiplier": (0, math.inf),
    "dry_base": (0, math.inf),
    "dry_allowed_length": (0, math.inf),
    "dry_penalty_last_n": (-1, math.inf),
    "dynatemp_range": (0, math.inf),
    "mirostat": (0, 2),
    "mirostat_ent": (0, math.inf),
    "mirostat_lr": (0, math.inf),
    "min_keep": (0, math.inf),
    "seed": (-1, _MAX_SEED),
}


@dataclass(frozen=True)
class SamplerParams:
    """llama.cpp's sampling parameters and defaults.

    temp: 0 or less is greedy. top_k: 0 or less is off. top_p, typical_p: 1 is off. min_p, xtc_probability: 0 is off.
    top_n_sigma: 0 or less is off. repeat_last_n: how many of the last tokens are penalized, -1 all, 0 none.
    dry_multiplier: 0 is off; dry_base, dry_allowed_length: a token that would make a repetition of n tokens longer
    loses multiplier * base ** (n - allowed_length); dry_penalty_last_n: how far back repetitions are looked for, -1
    all, 0 none; dry_sequence_breaker: texts that no repetition goes across. dynatemp_range: temp goes from
    temp - range to temp + range by the entropy, 0 is off; dynatemp_exp: the power of the entropy. mirostat: 1 or 2
    takes the place of all other samplers but temp, 0 is off; mirostat_ent: the surprise that it aims at, in bits (tau);
    mirostat_lr: how fast it learns (eta). logit_bias: what is added to tokens' logits, by id, -inf: never; kept as
    pairs. min_keep: truncating samplers keep at least so many (0 and 1 mean the same). seed: -1 takes a new one from
    the operating system. Raises SessionError when a value is out of range.
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breaker: Iterable[str] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exp: float = 1.0
    mirostat: int = 0
    mirostat_ent: float = 5.0
    mirostat_lr: float = 0.1
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = field(default=())
    seed: int = -1
    min_keep: int = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.type in ("int", "float"):
                _check_number(each.name, getattr(self, each.name), whole=each.type == "int")
                kind = int if each.type == "int" else float
                object.__setattr__(self, each.name, kind(getattr(self, each.name)))
        for name, (low, high) in _BOUNDS.items():
            self._in_range(name, low, high)
        if self.repeat_penalty <= 0:
            raise SessionError(f"repeat_penalty must be above 0, got {self.repeat_penalty}; 1.0 is no penalty.")
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        object.__setattr__(self, "dry_sequence_breaker", _breakers(self.dry_sequence_breaker))

    def _in_range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            default = type(self).__dataclass_fields__[name].default
            bounds = f"from {low} to {high}" if high < math.inf else f"at least {low}"
            raise SessionError(f"{name} must be {bounds}, got {value}; the default is {default}.")

    @property
    def biases(self) -> dict[int, float]:
        """What is added to tokens' logits, by id."""
        return dict(self.logit_bias)

    def seeds(self, count: int) -> list[SamplerParams]:
        """So many of the same with seeds that rise one by one from this one's, each random where it is -1."""
        return [self if self.seed < 0 else replace(self, seed=(self.seed + i) % (_MAX_SEED + 1)) for i in range(count)]

    def changed(self, options: Mapping[str, Any]) -> SamplerParams:
        """The same with some values changed, by name. Raises SessionError for a name that there is not."""
        unknown = [name for name in options if name not in SamplerParams.__dataclass_fields__]
        if unknown:
            known = ", ".join(each.name for each in fields(self))
            raise SessionError(f"a sampling parameter must be one of {known}; got {brief(unknown[0])}")
        return replace(self, **options)


class SamplerOptions(TypedDict, total=False):
    """SamplerParams' fields as keywords."""

    temp: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breaker: Iterable[str]
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exp: float
    mirostat: int
    mirostat_ent: float
    mirostat_lr: float
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]]
    seed: int
    min_keep: int


P = ParamSpec("P")
R = TypeVar("R")


def spells_out(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function whose last parameter is `**options: Unpack[SamplerOptions]`: help() and completion then show
    each keyword with its default."""
    signature = inspect.signature(function)
    own = list(signature.parameters.values())[:-1]
    more = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(SamplerParams)
    ]
    function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    return function


def _check_number(name: str, value: object, *, whole: bool) -> None:
    number = not isinstance(value, bool) and isinstance(value, (int, float))
    if not number or not -sys.float_info.max <= value <= sys.float_info.max:  # type: ignore[operator]
        raise SessionError(f"{name} must be a finite number, got {brief(value)}.")
    if whole and value != int(value):  # type: ignore[call-overload]
        raise SessionError(f"{name} must be an integer, got {value!r}.")


def _pairs(biases: object) -> tuple[tuple[int, float], ...]:
    """(id, bias) by rising id. Raises SessionError for what is no bias; NaN and +inf are none."""
    try:
        pairs = list(biases.items() if isinstance(biases, Mapping) else biases)  # type: ignore[call-overload]
        found = {token: float(bias) for token, bias in pairs}
    except (TypeError, ValueError):
        raise SessionError(
            f"logit_bias must give a number for each token id, as {{15043: 1.5}}, got {brief(biases)}"
        ) from None
    for token, bias in found.items():
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise SessionError(f"logit_bias must name tokens by their ids, 0 and up, got {brief(token)}")
        if not bias < math.inf:
            raise SessionError(f"a bias must be a finite number or -inf, got {bias} for token {token}")
    return tuple(sorted(found.items()))


def _breakers(texts: object) -> tuple[str, ...]:
    """As a tuple. Raises SessionError for what is no list of texts of 1 to MAX_BREAKER characters."""

    def refuse(got: object) -> NoReturn:
        raise SessionError(
            f"dry_sequence_breaker must be a list of texts of 1 to {MAX_BREAKER} characters, got {brief(got)}"
        )

    if isinstance(texts, str) or not isinstance(texts, Iterable):
        refuse(texts)
    found = tuple(texts)
    for text in found:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_BREAKER:
            refuse(text)
    return found
