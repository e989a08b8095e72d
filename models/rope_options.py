"""Changes to a model's rotation of positions when it is loaded, for contexts longer than it was trained on."""

from __future__ import annotations

from dataclasses import dataclass, fields

from graphrt.errors import SessionError
from graphrt.models.arch import read_file
from graphrt.models.gguf import GGUFFile
from graphrt.models.hparams import LEAST_STRETCH, MOST_STRETCH, ROPE_SCALINGS
from graphrt.models.key_reader import F32_MAX, F32_TINY
from graphrt.printing import brief_name

#: Where the keys of a file, without its architecture's name, say what a field here changes.
_KEYS = {
    "freq_base": "rope.freq_base",
    "freq_scale": "rope.scaling.factor",
    "scaling": "rope.scaling.type",
    "yarn_orig_ctx": "rope.scaling.original_context_length",
    "yarn_ext_factor": "rope.scaling.yarn_ext_factor",
    "yarn_attn_factor": "rope.scaling.attn_factor",
    "yarn_beta_fast": "rope.scaling.yarn_beta_fast",
    "yarn_beta_slow": "rope.scaling.yarn_beta_slow",
}
#: The least that a number may be.
_LEAST = {"freq_base": F32_TINY, "yarn_ext_factor": 0.0, "yarn_attn_factor": 0.0}
_LEAST |= {"yarn_beta_fast": F32_TINY, "yarn_beta_slow": F32_TINY}
MOST_CTX = 2**31 - 1


@dataclass(frozen=True)
class RopeOptions:
    """What replaces a file's own values; None: as the file says. They mean what the file's keys mean, layers with a
    sliding window that have a rotation of their own keep it.

    freq_base: of the angles' frequencies; freq_scale: positions are multiplied by it, 0.25 for four times the context;
    scaling: "none", "linear" or "yarn", by which that is done; yarn_orig_ctx: tokens of context that the model was
    trained on; yarn_ext_factor: 1 for YaRN's mix of stretched and plain angles, 0 for stretched ones alone;
    yarn_attn_factor: times q's and k's size; yarn_beta_fast, yarn_beta_slow: turns within the trained context from
    which, and up to which, angles are plain and stretched.
    """

    freq_base: float | None = None
    freq_scale: float | None = None
    scaling: str | None = None
    yarn_orig_ctx: int | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None

    def __post_init__(self) -> None:
        """Raises SessionError for a value that can't be."""
        if self.scaling not in (None, *ROPE_SCALINGS):
            raise SessionError(f"a rotation's scaling must be one of {', '.join(ROPE_SCALINGS)}, got {self.scaling!r}")
        _check("freq_scale", self.freq_scale, 1 / MOST_STRETCH, 1 / LEAST_STRETCH)
        _check("yarn_orig_ctx", self.yarn_orig_ctx, 1, MOST_CTX)
        for name, least in _LEAST.items():
            _check(name, getattr(self, name), least, F32_MAX)

    @property
    def given(self) -> dict[str, float | int | str]:
        """What is changed."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def apply(self, file: GGUFFile) -> None:
        """Makes an open file say so from now on. Raises SessionError for a model that has no rotation or, for YaRN's
        numbers, one of another scaling, and ArchError for a rotation that its family can't have."""
        given = self.given
        if not given:
            return
        arch = file.get("general.architecture", str)
        hp = read_file(file)
        if hp.rope is None:
            raise SessionError(f"{arch} models have no rotation of positions to change; leave {', '.join(given)} out")
        kind = self.scaling or file.get(f"{arch}.rope.scaling.type", str, "linear")
        only_yarn = [name for name in given if name.startswith("yarn_") and name != "yarn_orig_ctx"]
        if only_yarn and kind != "yarn":
            raise SessionError(
                f"{', '.join(only_yarn)} must go with the scaling yarn, this model's is {brief_name(kind)}; ask for "
                f"that too"
            )
        if kind == "yarn" and self.freq_scale is not None:  # then that many more tokens count as trained on
            orig = self.yarn_orig_ctx or hp.rope.n_ctx_orig
            file.metadata.override(f"{arch}.{_KEYS['yarn_orig_ctx']}", orig)
            file.metadata.override(f"{arch}.context_length", max(1, min(MOST_CTX, int(orig / self.freq_scale))))
        for name, value in given.items():
            value = 1.0 / self.freq_scale if name == "freq_scale" and self.freq_scale is not None else value
            file.metadata.override(f"{arch}.{_KEYS[name]}", value)
        read_file(file)


def _check(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not (isinstance(value, (int, float)) and low <= value <= high):
        raise SessionError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}; give another")
