"""What `/set` changes: how the next token is drawn, how long an answer may be, whether Markdown is rendered."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from graphrt.errors import SessionError
from graphrt.models.sampling_params import SamplerParams
from graphrt.printing import brief
from graphrt.tools.inspect.checked_json import Checked
from graphrt.tools.sampling import spelled

#: How `/set` spells true and false.
SWITCH = {"on": True, "off": False}
#: The samplers' parameters that are several values: how they are read, and how they are shown.
_LISTS: dict[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    "logit_bias": (spelled.biases, spelled.shown_biases),
    "dry_sequence_breaker": (spelled.texts, spelled.shown_texts),
}
#: Characters of one of these in a file.
_MAX_LIST = 100_000


@dataclass(frozen=True)
class Settings:
    """sampling: the samplers' parameters; predict: the most tokens of an answer, -1 for no limit but the context;
    markdown: whether answers are rendered on a terminal. Raises SessionError for a `predict` under 1 that isn't -1."""

    sampling: SamplerParams = field(default_factory=SamplerParams)
    predict: int = -1
    markdown: bool = True

    def __post_init__(self) -> None:
        if self.predict != -1 and self.predict < 1:
            raise SessionError(f"predict must be at least 1, or -1 for no limit, got {self.predict}")

    def values(self) -> dict[str, Any]:
        """Every setting by its name: numbers, true or false, and lists as they are typed."""
        return {"predict": self.predict, "markdown": self.markdown} | _plain(self.sampling)

    def changed(self, name: str, text: str) -> Settings:
        """The settings with one of them changed. text: as typed. Raises SessionError."""
        key = name.replace("-", "_")
        found = self.values()
        if key not in found:
            close = difflib.get_close_matches(key, found, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SessionError(f"a setting must be one of {', '.join(found)}, got {brief(name)}{hint}")
        return self._with({key: _read(key, text, type(found[key]))})

    def loaded(self, saved: Mapping[str, Checked]) -> Settings:
        """The settings with those of a file, as values() gives them. Raises GraphError, SessionError."""
        own = self.values()
        for name, value in saved.items():
            if name not in own:
                value.refuse(f"one of {', '.join(own)}")
        return self._with({name: _checked(value, type(own[name])) for name, value in saved.items()})

    def _with(self, values: Mapping[str, Any]) -> Settings:
        mine = {name: value for name, value in values.items() if name in ("predict", "markdown")}
        theirs = {name: value for name, value in values.items() if name not in mine}
        theirs |= {name: _LISTS[name][0](value) for name, value in theirs.items() if name in _LISTS}
        return replace(self, sampling=replace(self.sampling, **theirs), **mine)


def _plain(sampling: SamplerParams) -> dict[str, Any]:
    """The samplers' parameters: numbers, and lists as they are typed."""
    given = asdict(sampling)
    return {f.name: _LISTS[f.name][1](given[f.name]) if f.name in _LISTS else given[f.name] for f in fields(sampling)}


def _read(name: str, text: str, kind: type) -> Any:
    try:
        return SWITCH[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        rule = "on or off" if kind is bool else "a whole number" if kind is int else "a number"
        raise SessionError(f"{name} must be {rule}, got {brief(text)}") from None


def _checked(value: Checked, kind: type) -> Any:
    if kind is bool:
        return value.true_or_false()
    if kind is str:
        if not isinstance(value.value, str) or len(value.value) > _MAX_LIST:
            value.refuse(f"a text of at most {_MAX_LIST} characters")
        return value.value
    return value.whole(-1, 2**64 - 1) if kind is int else value.number()
