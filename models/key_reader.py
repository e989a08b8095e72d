"""Reads keys of a GGUF file: every value by its type, finite, in its range and of its length, or an error that names
the key. Whatever reads keys for a model or a tokenizer reads them here.

    keys = KeyReader(gguf.metadata, TokenizerError)
    keys.whole("tokenizer.ggml.bos_token_id", low=0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from graphrt.errors import ModelError
from graphrt.models.gguf_parse import shown
from graphrt.printing import brief, brief_name

INT32_MAX = 2**31 - 1
#: Kernels take numbers as f32.
F32_MAX, F32_TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


class Required:
    """The type of REQUIRED: no default, so that a missing key is an error."""


REQUIRED: Final = Required()


class KeyReader:
    """The keys `md` with their values: arrays as numpy arrays or lists. error: what is raised for all that is wrong."""

    def __init__(self, md: Mapping[str, Any], error: type[ModelError]) -> None:
        self.md, self.error = md, error

    def fail(self, key: str, rule: str, value: object) -> NoReturn:
        """Raises the error for a key that must be `rule`."""
        raise self.error(f"{brief_name(key)} must be {rule}, got {shown(value)}; the file is damaged")

    def _value(self, key: str, default: object, rule: str) -> Any:
        """The value, None for a missing key that has a default."""
        if key in self.md:
            return self.md[key]
        if isinstance(default, Required):
            raise self.error(f"the key {brief(key)} ({rule}) is missing. Use a complete GGUF file.")
        return None

    def whole(self, key: str, default: int | Required = REQUIRED, low: int = -1, high: int = 2**32 - 1) -> int:
        """A whole number from `low` to `high`; -1 and 2^32 - 1 are how files say "none"."""
        wide = low <= -1 and high >= 2**32 - 1
        rule = "an integer" if wide else f"an integer from {low} to {high}"
        value = self._value(key, default, rule)
        if value is None:
            return default  # type: ignore[return-value]
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
            self.fail(key, rule, value)
        return int(value)

    def real(
        self, key: str, default: float | Required = REQUIRED, low: float = -F32_MAX, high: float = F32_MAX
    ) -> float:
        """A finite number from `low` to `high`; a whole one will do."""
        rule = "a finite number" if (low, high) == (-F32_MAX, F32_MAX) else f"a finite number from {low:g} to {high:g}"
        value = self._value(key, default, rule)
        if value is None:
            return default  # type: ignore[return-value]
        number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not low <= value <= high:
            self.fail(key, rule, value)
        return float(value)

    def flag(self, key: str, default: bool | Required = REQUIRED) -> bool:
        value = self._value(key, default, "a bool")
        if value is None:
            return default  # type: ignore[return-value]
        if not isinstance(value, (bool, np.bool_)):
            self.fail(key, "a bool", value)
        return bool(value)

    def text(self, key: str, default: str | Required = REQUIRED) -> str:
        value = self._value(key, default, "a string")
        if value is None:
            return default  # type: ignore[return-value]
        if not isinstance(value, str):
            self.fail(key, "a string", value)
        return value

    def strings(self, key: str) -> list[str]:
        """An array of strings, empty if absent."""
        values = self._value(key, None, "")
        if values is None:
            return []
        listed = isinstance(values, Sequence) and not isinstance(values, (str, bytes))
        if not listed or set(map(type, values)) - {str}:
            self.fail(key, "an array of strings", values)
        return list(values)

    def numbers(self, key: str, kinds: str = "iuf") -> npt.NDArray[Any] | None:
        """An array of numbers, None if absent. kinds: of numpy's letters, those that its type may have."""
        value = self._value(key, None, "")
        if value is None:
            return None
        rule = "an array of numbers" if "f" in kinds else "an array of whole numbers"
        plain = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        if not (isinstance(value, np.ndarray) or (plain and not set(map(type, value)) - {int, float, bool})):
            self.fail(key, rule, value)
        array = np.asarray(value)
        if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
            self.fail(key, rule, array)
        return array
