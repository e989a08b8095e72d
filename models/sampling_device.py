"""Sampling on a device: what chooses a text's tokens as the tables of PENALIZE and SAMPLE_EACH have it, and these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from graphrt import ops
from graphrt.backend import Backend, Usage
from graphrt.errors import SessionError
from graphrt.models.grammar import masks_of
from graphrt.models.sampling import LEFT_NONE, Matcher, Sampler, Uniforms
from graphrt.ops.sample import MAX_TOP_K
from graphrt.ops.sample_each import N_SETTINGS, RowSettings
from graphrt.tensor import Tensor, new_input, new_tensor

#: Biases of a text, and its last tokens that penalties may look at.
MAX_BIASES, MAX_PAST = 512, 1024
#: Candidates that steps have room for: as few as the largest top_k of their rows needs.
CANDIDATES = (64, MAX_TOP_K)
#: In place of their number: each row takes its likeliest token, once biases and penalties have changed its logits.
LIKELIEST = -1
_GREEDY = RowSettings()


@dataclass(frozen=True)
class Drawn:
    """How a text's tokens are chosen. uniforms: what they are drawn by, None where the highest logit is taken; biases:
    (id, what is added), -inf for never; matcher: what a grammar lets through, which goes on behind each token; costs:
    gives what comes off which tokens after a text, all of its tokens, None for nothing."""

    settings: RowSettings = _GREEDY
    uniforms: Uniforms | None = None
    biases: Sequence[tuple[int, float]] = ()
    matcher: Matcher | None = None
    costs: Callable[[Sequence[int]], Mapping[int, np.float32]] | None = None

    @property
    def waits(self) -> bool:
        """The host must know a token before the next one can be chosen."""
        return self.matcher is not None or self.costs is not None

    @property
    def n_uniforms(self) -> int:
        """Numbers that a token takes."""
        return 0 if self.uniforms is None else 1 + (self.settings.xtc_probability > 0)

    @property
    def is_plain(self) -> bool:
        """The model's own likeliest token is taken."""
        return self.settings.temp <= 0 and not (self.biases or self.waits or self.settings.penalizes)


def drawn(sampler: Sampler, n_ctx: int) -> Drawn | None:
    """What makes SAMPLE_EACH choose as a sampler does, None where nothing does: top_n_sigma, a temperature that
    changes, mirostat, DRY behind a repeat penalty, log-probabilities, a top_k that is off or over 1024, more biases or
    a longer memory than there is room for, ends that must come late. n_ctx: the most tokens of a text."""
    p = sampler.params
    changes = p.top_n_sigma > 0 or p.dynatemp_range > 0 or p.mirostat
    last_n = (n_ctx if p.repeat_last_n < 0 else p.repeat_last_n) if sampler.has_penalties else 0
    if changes and not sampler.takes_the_first:
        return None
    if sampler.has_dry and sampler.has_penalties and p.repeat_penalty != 1:  # that one multiplies, biases come before
        return None
    if sampler.best is not None or sampler.least or len(sampler.biases) > MAX_BIASES or min(last_n, n_ctx) > MAX_PAST:
        return None
    edits = {
        "repeat": p.repeat_penalty, "frequency": p.frequency_penalty, "presence": p.presence_penalty,
        "last_n": min(last_n, MAX_PAST), "n_biases": len(sampler.biases), "masked": sampler.matcher is not None,
    }  # fmt: skip
    biases, costs = tuple(sampler.biases.items()), sampler.dry_costs if sampler.has_dry else None
    if sampler.takes_the_first:
        return Drawn(RowSettings(**edits), None, biases, sampler.matcher, costs)
    if not 1 <= p.top_k <= MAX_TOP_K:
        return None
    least = math.log(p.min_p) if p.min_p > 0 else -math.inf
    settings = RowSettings(
        p.temp, p.top_k, p.top_p, least, min(p.min_keep, MAX_TOP_K), p.typical_p, p.xtc_probability, p.xtc_threshold,
        **edits,
    )  # fmt: skip
    return Drawn(settings, sampler.uniforms, biases, sampler.matcher, costs)


@dataclass(frozen=True)
class RowInputs:
    """What is said of each row of logits whose next token is wanted. slots: i32 [n], its column of the tables;
    uniforms: f64 [2, n]; lengths: i32 [n], the tokens that its text has; places: i64 [n], where the chosen one is put
    among what was said, -1 for nowhere; targets: i64 [n], the row of the board that gets it, -1 for none."""

    slots: Tensor
    uniforms: Tensor
    lengths: Tensor
    places: Tensor
    targets: Tensor

    @classmethod
    def of(cls, n: int) -> RowInputs:
        return cls(
            new_input("i32", n, name="inp_slots"),
            new_input("f64", 2, n, name="inp_uniform"),
            new_input("i32", n, name="inp_said_lengths"),
            new_input("i64", n, name="inp_said_places"),
            new_input("i64", n, name="inp_targets"),
        )


@dataclass
class SampleTables:
    """The tables of an engine's sequences, as leafs with buffers: settings, biased, biases, past, mask, as
    ops.penalize() has them, with a column for each sequence."""

    n_vocab: int
    n_seq: int
    home: Backend
    _settings: dict[int, RowSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.n_seq
        self.settings = self._leaf("f64", N_SETTINGS, n, name="sample_settings")
        self.biased = self._leaf("i32", MAX_BIASES, n, name="sample_biased")
        self.biases = self._leaf("f64", MAX_BIASES, n, name="sample_biases")
        self.past = self._leaf("i32", 1, MAX_PAST * n, name="sample_past")
        self.mask = self._leaf("i32", -(-self.n_vocab // 32), n, name="sample_mask")
        for seq in range(n):
            self._put(self.settings, seq, np.array(_GREEDY.column))

    def _leaf(self, kind: str, *ne: int, name: str) -> Tensor:
        leaf = new_tensor(kind, *ne, name=name)
        leaf.buffer = self.home.alloc(leaf.nbytes, Usage.STATE)
        leaf.buffer.write(0, np.zeros(leaf.nbytes, np.uint8))
        return leaf

    def choose(self, logits: Tensor, rows: RowInputs, most: int) -> list[Tensor]:
        """The next token of each row, i32 [n], and the node that notes them among what was said. most: candidates, or
        LIKELIEST."""
        n = rows.slots.ne[0]
        past = ops.reshape(self.past, MAX_PAST, self.n_seq)
        changed = ops.penalize(
            logits, rows.slots, self.settings, self.biased, self.biases, past, rows.lengths, self.mask,
            name="result_penalized",
        )  # fmt: skip
        if most == LIKELIEST:
            chosen = ops.argmax(changed)
        else:
            chosen = ops.sample_each(changed, rows.uniforms, rows.slots, self.settings, most)
        return [chosen, ops.set_rows(ops.reshape(chosen, 1, n), rows.places, self.past, name="said")]

    # ---- filling, in the order of the device's work ----

    def begin(self, seq: int, how: Drawn, tokens: Sequence[int]) -> None:
        """A sequence's tokens are chosen so from now on. tokens: all that it has, read or not."""
        if self._settings.get(seq, _GREEDY) != how.settings:
            self._put(self.settings, seq, np.array(how.settings.column))
            self._settings[seq] = how.settings
        self._put_biases(seq, dict(how.biases))
        if how.settings.penalizes:
            ring = np.zeros(MAX_PAST, np.int32)
            positions = np.arange(max(0, len(tokens) - MAX_PAST), len(tokens))
            ring[positions % MAX_PAST] = np.asarray(tokens[len(tokens) - len(positions) :], np.int32)
            self._put(self.past, seq, ring, MAX_PAST)

    def _put_biases(self, seq: int, biases: Mapping[int, float]) -> None:
        if biases:
            self._put(self.biased, seq, np.fromiter(biases, np.int32, len(biases)))
            self._put(self.biases, seq, np.fromiter(biases.values(), np.float64, len(biases)))

    def deter(self, seq: int, how: Drawn, tokens: Sequence[int]) -> None:
        """What comes off a sequence's next token, whose text so far is `tokens`: biases beside its own. !! Where there
        is no room for all of them the smallest are left out."""
        assert how.costs is not None
        costs = {token: cost for token, cost in how.costs(tokens).items() if 0 <= token < self.n_vocab}
        room = max(0, MAX_BIASES - len(how.biases))
        biases = dict(how.biases)
        for token in sorted(costs, key=costs.__getitem__, reverse=True)[:room]:
            biases[token] = biases.get(token, 0.0) - float(costs[token])
        self._put_biases(seq, biases)
        settings = replace(how.settings, n_biases=len(biases))
        if self._settings.get(seq, _GREEDY) != settings:
            self._put(self.settings, seq, np.array(settings.column))
            self._settings[seq] = settings

    def allow(self, hows: Mapping[int, Drawn]) -> dict[int, SessionError]:
        """What sequences' grammars let through next, by sequence. Gives those where grammar and biases leave nothing,
        or finding it takes too much, with the error. Sequences side by side are one copy."""
        seqs = sorted(hows)
        rows, failed = masks_of({seq: _matcher(hows[seq]) for seq in seqs}, self.mask.ne[0])
        left = rows.max(axis=1) > 0
        for i, seq in enumerate(seqs):
            if hows[seq].biases:
                left[i] = _leaves_any(rows[i], hows[seq].biases)
            if not left[i] and seq not in failed:
                failed[seq] = SessionError(f"at least one token must be allowed, {LEFT_NONE}; allow more")
        if failed:
            rows = rows[[seq not in failed for seq in seqs]]
            seqs = [seq for seq in seqs if seq not in failed]
        first = 0
        for end in [*(np.flatnonzero(np.diff(seqs) != 1) + 1).tolist(), len(seqs)] if seqs else []:
            self._put(self.mask, seqs[first], rows[first:end])
            first = end
        return failed

    def _put(self, leaf: Tensor, seq: int, values: npt.NDArray[np.generic], width: int = 0) -> None:
        assert leaf.buffer is not None
        size = values.itemsize * (width or leaf.ne[0])
        leaf.buffer.write(seq * size, np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def _matcher(how: Drawn) -> Matcher:
    assert how.matcher is not None
    return how.matcher


def _leaves_any(words: npt.NDArray[np.uint32], biases: Sequence[tuple[int, float]]) -> bool:
    """Whether biases leave any of the tokens that a grammar lets through, a bit each."""
    never = np.array([token for token, bias in biases if bias == -math.inf], np.int64)
    left = words.copy()
    np.bitwise_and.at(left, never // 32, ~(np.uint32(1) << (never % 32).astype(np.uint32)))
    return bool(left.any())


def place_of(seq: int, length: int) -> int:
    """Where a sequence's token at position `length` is put among what was said."""
    return seq * MAX_PAST + length % MAX_PAST


def candidates(settings: Iterable[RowSettings]) -> int:
    """How many candidates a step of such rows has room for."""
    wanted = max((each.top_k for each in settings), default=0)
    return next(n for n in CANDIDATES if n >= min(wanted, MAX_TOP_K))


def candidates_of(hows: Sequence[Drawn], *, itself: bool = False) -> int:
    """The same of a step of texts whose tokens are chosen so, 0 where all take the model's own likeliest token. itself:
    of a step that chooses itself, LIKELIEST where none is drawn."""
    if all(how.is_plain for how in hows):
        return 0
    if itself and all(how.settings.temp <= 0 for how in hows):
        return LIKELIEST
    return candidates(how.settings for how in hows)
