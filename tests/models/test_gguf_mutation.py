"""Damages small GGUF files in thousands of ways: the loader must either load the result or raise GGUFError.

Nothing else is allowed: no other exception, no hang, no large allocation, no data shorter than promised. Each batch
runs in a child process under an address space limit, so an allocation by a hostile count fails there at once.

By hand: python tests/models/test_gguf_mutation.py SEED COUNT
"""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest
from support import ROOT, TESTS
from support.gguf_files import Built, build, sample_kv, sample_tensors

from graphrt.errors import GGUFError
from graphrt.models.gguf import GGUFFile
from graphrt.models.gguf_parse import ArraySpan

BATCHES = 4
PER_BATCH = 25_000
SECONDS_EACH = 5
MEMORY = 200 << 20
CODES = {"B": 1, "b": 1, "H": 2, "h": 2, "I": 4, "i": 4, "f": 4, "Q": 8, "q": 8, "d": 8}


class HangError(BaseException):
    """One mutation took too long. Not an Exception, so that nothing on the way can swallow it."""


def bases() -> list[Built]:
    """The undamaged files."""
    kv, tensors = sample_kv(), sample_tensors()
    wide = [("general.alignment", "u32", 128), *(row for row in kv if row[0] != "general.alignment")]
    return [
        build(kv, tensors),
        build(kv, tensors, version=2),
        build(kv, sample_tensors(">"), order=">"),
        build(wide, tensors, alignment=128),
        build(kv),
        build((), tensors[:3]),
    ]


def mutate(rng: random.Random, base: Built) -> tuple[str, bytes]:
    """One damaged copy, and what was done to it."""
    how = rng.choice(MUTATIONS)
    return how.__name__, bytes(how(rng, base))


def flip_bytes(rng: random.Random, base: Built) -> bytearray:
    data = bytearray(base.data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return data


def flip_bit(rng: random.Random, base: Built) -> bytearray:
    data = bytearray(base.data)
    header_end = max(offset for offset, _ in base.fields.values()) + 8
    data[rng.randrange(min(len(data), header_end))] ^= 1 << rng.randrange(8)
    return data


def truncate(rng: random.Random, base: Built) -> bytearray:
    return base.data[: rng.randrange(len(base.data))]


def change_field(rng: random.Random, base: Built) -> bytearray:
    return _change_fields(rng, base, 1)


def change_fields(rng: random.Random, base: Built) -> bytearray:
    return _change_fields(rng, base, rng.randint(2, 4))


def _change_fields(rng: random.Random, base: Built, n: int) -> bytearray:
    data = bytearray(base.data)
    for label in rng.sample(sorted(base.fields), n):
        offset, code = base.fields[label]
        width = CODES[code[1]]
        old = int.from_bytes(data[offset : offset + width], "little" if code[0] == "<" else "big")
        new = _interesting(rng, old, len(data), offset) % (1 << (8 * width))
        data[offset : offset + width] = new.to_bytes(width, "little" if code[0] == "<" else "big")
    return data


def _interesting(rng: random.Random, old: int, size: int, offset: int) -> int:
    """Numbers that break sums, products and comparisons, and those next to the right one."""
    power = 1 << rng.randrange(65)
    near = rng.choice((old, size, size - offset, size - offset - 8, (size - offset) // 8, power, -power))
    return rng.choice((near + rng.randint(-2, 2), old * 2, old // 2, rng.randrange(64), rng.getrandbits(64)))


def insert(rng: random.Random, base: Built) -> bytearray:
    at = rng.randrange(len(base.data))
    junk = rng.choice((b"\xff" * 8, bytes(8), rng.randbytes(rng.randint(1, 40)), struct.pack("<Q", 1 << 62)))
    return base.data[:at] + junk + base.data[at:]


def cut_out(rng: random.Random, base: Built) -> bytearray:
    at = rng.randrange(len(base.data))
    return base.data[:at] + base.data[at + rng.randint(1, 40) :]


def repeat(rng: random.Random, base: Built) -> bytearray:
    at = rng.randrange(len(base.data))
    end = at + rng.randint(1, 200)
    return base.data[:end] + base.data[at:]


def overwrite(rng: random.Random, base: Built) -> bytearray:
    data = bytearray(base.data)
    at = rng.randrange(len(data))
    junk = rng.choice((b"\xff" * 16, bytes(16), rng.randbytes(24)))
    data[at : at + len(junk)] = junk[: len(data) - at]
    return data


MUTATIONS = (
    flip_bytes, flip_bit, truncate, change_field, change_field, change_fields, insert, cut_out, repeat, overwrite,
)  # fmt: skip


def use_everything(raw: bytes, dequantize: bool) -> bool:
    """Loads and touches all there is. True: a clean load; False: refused with a good GGUFError."""
    try:
        with GGUFFile.from_bytes(raw) as f:
            # Looked at before it is decoded: slicing would cut a string that ends outside the file short in silence.
            for value in f.metadata._values.values():
                assert not isinstance(value, ArraySpan) or value.start <= value.end <= len(raw), value
            for key in f.metadata:
                f.metadata[key]
            for name, info in f.tensors.items():
                assert 0 <= info.offset <= info.offset + info.nbytes <= len(raw), info
                assert f.data(name).nbytes == info.nbytes, info
                if dequantize and info.dtype.name in ("f32", "q4_K", "q8_0"):
                    assert f.dequantize(name).shape == info.ne[::-1]
            f.check_tensors()
    except GGUFError as err:
        lines = str(err).splitlines()
        assert 1 <= len(lines) <= 3 and max(map(len, lines)) < 400, lines
        return False
    return True


def run_batch(seed: int, count: int) -> None:
    """`count` mutations; exits with the story of the first one that is not handled."""
    rng = random.Random(seed)
    files = bases()
    for base in files:
        assert use_everything(bytes(base.data), dequantize=True), "the undamaged file must load"
    limit_memory()
    peak = peak_bytes()
    signal.signal(signal.SIGALRM, _hang)
    clean = 0
    for i in range(count):
        how, raw = mutate(rng, rng.choice(files))
        signal.setitimer(signal.ITIMER_REAL, SECONDS_EACH)
        try:
            clean += use_everything(raw, dequantize=i % 16 == 0)
        except (Exception, HangError):  # the verdict of this test: anything but GGUFError is a bug
            sys.exit(f"seed {seed}, mutation {i} ({how}):\n{traceback.format_exc()}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    grown = peak_bytes() - peak
    if grown > MEMORY:
        sys.exit(f"seed {seed}: the peak memory grew by {grown >> 20} MB")
    print(f"{count} mutations, {clean} loaded, {count - clean} refused, peak memory +{grown >> 20} MB")


def _hang(signum: int, frame: FrameType | None) -> NoReturn:
    raise HangError(f"more than {SECONDS_EACH} seconds")


def limit_memory() -> None:
    """Lets the process grow by MEMORY at most."""
    import resource

    now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))


def peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is Linux's")
@pytest.mark.parametrize("seed", range(BATCHES))
def test_damaged_files_load_or_are_refused(seed: int) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, str(seed), str(PER_BATCH)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    loaded, refused = int(words[2]), int(words[4])
    # A mutator that only ever breaks the first bytes, or nothing at all, would prove nothing.
    assert loaded + refused == PER_BATCH
    assert loaded > PER_BATCH // 10 and refused > PER_BATCH // 4, done.stdout


if __name__ == "__main__":
    run_batch(int(sys.argv[1]), int(sys.argv[2]))
