"""Measures configurations of the portable attention kernel on this GPU and prints the fastest as rows of configs.py.

Configurations are chosen from a table when a graph is prepared and never tried out at run time; this is how rows come
about, offline. A configuration counts only if its result is right, by the gate of `graphrt bench op`. Other kernels
(decode.py, hopper*.py) serve many of these shapes on their GPUs; the rows are for the rest and for other GPUs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphrt.errors import GraphrtError
from graphrt.tools.common import print_json, print_table, progress, write_text
from graphrt.tools.outputs import OutputFile

if TYPE_CHECKING:
    from graphrt.backends.triton.kernels.flash_attn.configs import Config
    from graphrt.tools.bench.op_shapes import Shape

HEADS = (32, 8)
HEAD_SIZES = (64, 128, 256, 512)
#: What stands for a kind of types (configs.kind_of).
TYPES = {"half": "f16", "quantized": "q8_0", "f32": "f32"}
#: Keys: of decode so many that memory counts, of prefill a common length.
N_KV = {"decode": 16384, "prefill": 4096}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--form", choices=("decode", "prefill"), help="only one (default: both)")
    add("-d", "--head-size", type=int, choices=HEAD_SIZES, action="append", help="only these (default: all)")
    add("--kind", choices=tuple(TYPES), action="append", help="only these kinds of K and V (default: all)")
    add("--tiny", action="store_true", help="small shapes and few configurations, to try this out")
    add("-o", "--output-file", type=OutputFile, metavar="FILE", help="write the rows there too")
    add("--json", action="store_true", help="print a JSON object")


@dataclass(frozen=True)
class Measured:
    """A configuration and its time in seconds, or why it has none."""

    config: Config
    seconds: float | None
    why: str = ""


def candidates(form: str, tiny: bool = False, amd: bool = False) -> Iterator[Config]:
    """The configurations to try for a form. amd: with what its compiler can be asked for."""
    from graphrt.backends.triton.kernels.flash_attn.configs import Config

    if tiny:
        yield from (Config(16, 32, 1, 1), Config(16, 64, 1, 1, ways=2))
        return
    if amd:
        asked = itertools.product(candidates(form), (0, 1, 2, 3, 4), (16, 32), (False, True))
        for config, waves, size, early in asked:
            if not config.ways and config.stages < 3 and config.block_m >= size:
                yield replace(config, waves_per_eu=waves, matrix_instr_nonkdim=size, pre_load_v=early)
    elif form == "decode":
        for block_n, warps, stages, ways in itertools.product((32, 64, 128), (4, 8), (1, 2, 3), (0, 4)):
            if not ways or block_n // ways >= 16:
                yield Config(16, block_n, warps, stages, ways, per_sm=2 if block_n < 128 else 1)
    else:
        for block_m, block_n, warps, stages in itertools.product((16, 32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3)):
            yield Config(block_m, block_n, warps, stages)


def main(args: argparse.Namespace) -> int:
    from graphrt.backend import get_backend

    backend = get_backend("triton")
    device = backend.devices()[0]
    rows = []
    for form, d, kind in _wanted(args):
        found = _tune(form, d, kind, args.tiny)
        best = min((m for m in found if m.seconds is not None), key=lambda m: m.seconds or 0.0, default=None)
        rows.append((form, d, kind, best, len(found)))
    lines = [_row_text(form, d, kind, best) for form, d, kind, best, _ in rows if best is not None]
    if args.output_file is not None:
        head = f"# measured by `graphrt tune` on {device.description or device.name}"
        write_text(args.output_file, "\n".join([head, *lines]) + "\n")
    if args.json:
        print_json({"device": device.description, "rows": lines})
    else:
        shown = [
            [
                form,
                d,
                kind,
                f"{1e6 * best.seconds:.1f}" if best and best.seconds else "none",
                tried,
                best and best.config,
            ]
            for form, d, kind, best, tried in rows
        ]
        print_table(["form", "head size", "kind", "us", "tried", "best"], shown)
        print("\n" + "\n".join(lines))
    return 0 if all(best is not None for *_, best, _ in rows) else 1


def _wanted(args: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    forms = [args.form] if args.form else list(N_KV)
    return iter(itertools.product(forms, args.head_size or HEAD_SIZES, args.kind or TYPES))


def _shape(form: str, d: int, kind: str, tiny: bool) -> Shape:
    from graphrt.tools.bench.op_shapes import Shape

    n_kv = N_KV[form] if not tiny else 64
    n_q, mask = (1, "visible") if form == "decode" else (n_kv, "causal")
    heads = HEADS if not tiny else (4, 2)
    return Shape(form, d, *heads, n_q, n_kv, d, TYPES[kind], mask)


def _tune(form: str, d: int, kind: str, tiny: bool) -> list[Measured]:
    import torch

    tried = list(candidates(form, tiny, torch.version.hip is not None))
    shape = _shape(form, d, kind, tiny)
    with progress(f"{form} {d} {kind}", len(tried)) as advance:
        found = []
        for config in tried:
            found.append(_measure(shape, config, tiny))
            advance()
    return found


def _measure(shape: Shape, config: Config, tiny: bool) -> Measured:
    """One configuration: checked, then timed. A compiler's or a driver's refusal is a reason, whatever its class."""
    import torch

    import graphrt
    from graphrt.backend import get_backend
    from graphrt.tools.bench.op_check import check
    from graphrt.tools.bench.op_inputs import Noise, build, n_nodes_for
    from graphrt.tools.bench.timing import CudaClock, HostClock

    cuda = torch.cuda.is_available()
    cache = torch.cuda.get_device_properties(0).L2_cache_size if cuda else 0
    clock = CudaClock() if cuda else HostClock()
    try:
        n_nodes = 1 if tiny else n_nodes_for(shape, cache)
        program = build(shape, n_nodes, Noise())
        exe = graphrt.prepare(program.graph, get_backend("triton", config=config))
        program.fill(exe)
        for _ in range(1 if tiny else 3):
            exe.run()
        wrong = check(program, exe, "cuda" if cuda else "cpu").wrong
        if wrong:
            return Measured(config, None, wrong)
        return Measured(config, clock.times(exe.run, 1 if tiny else 10, exe.synchronize).median / n_nodes)
    except GraphrtError:
        raise
    except Exception as error:  # it is what this tool is for: whatever a configuration does, the others are measured
        return Measured(config, None, f"{type(error).__name__}: {error}"[:200])


def _row_text(form: str, d: int, kind: str, best: Measured) -> str:
    """A row as configs.py has it."""
    c = best.config
    rows = "16" if form == "decode" else "MANY"
    ways = f", ways={c.ways}" if c.ways else ""
    amd = "".join(
        f", {name}={getattr(c, name)}"
        for name in ("waves_per_eu", "matrix_instr_nonkdim", "pre_load_v")
        if getattr(c, name)
    )
    made = f"Config({c.block_m}, {c.block_n}, {c.warps}, {c.stages}{ways}, per_sm={c.per_sm}{amd})"
    return f'    Row({rows}, {d}, ("{kind}",), {made}),  # {1e6 * (best.seconds or 0.0):.1f} us'
