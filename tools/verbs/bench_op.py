"""Speed of one op on a GPU, shape by shape, beside the device's ceilings and torch's SDPA in the same process.

Before a shape is timed, rows of its result are compared with float64; a wrong result is not reported. llama.cpp's
figures are quoted, see tools/bench/op_shapes.py. `graphrt bench MODEL` measures a whole model.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphrt.errors import BackendError, GraphError, UnsupportedError
from graphrt.tools.bench.op_shapes import MEASURED, SETS, Shape, shapes_of, tiny
from graphrt.tools.common import print_json, print_table, whole, write_text
from graphrt.tools.outputs import OutputFile

if TYPE_CHECKING:
    from graphrt.backend import Backend
    from graphrt.tools.bench.op_inputs import Noise
    from graphrt.tools.bench.op_report import Report, Row
    from graphrt.tools.bench.timing import Clock, Times

#: The ops that have tables of their own.
VARLEN, BACKWARD = "FLASH_ATTN_VARLEN", "FLASH_ATTN_BACK"
#: Runs before anything is looked at: a backend may compile in the first and capture in the next ones.
WARM_UP_RUNS = 3
#: What comes first, before any shape.
_CEILINGS = "measuring what this machine can do at most: copies and products ..."
#: Ours and the peers are measured in turn, so that all meet the same machine.
ROUNDS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", help=f"the op: {', '.join(MEASURED)}")
    add = parser.add_argument_group("which shapes").add_argument
    add("-s", "--shape", default="", metavar="SUBSTRING", help="only shapes with that in their names")
    add("--set", default="default", choices=SETS, help="default: default, about a minute; full: KV up to 65536")
    add("--model", metavar="NAME", help="shapes of this model's attention instead, by its name in --synthetic")
    add("--list", action="store_true", help="print the shapes and their marks, and measure nothing")
    add("--tiny", action="store_true", help="shrink every size, to try this out on a CPU")
    add = parser.add_argument_group("how").add_argument
    add(
        "-b", "--backend", metavar="NAME", help="a name or MODULE:CLASS (default: triton; cpu for --tiny without a GPU)"
    )
    add("--schedule", metavar="NAME", help="given to the backend as its option `schedule`")
    add("-r", "--repetitions", type=whole(1), metavar="N", help="timed runs (default: 0.3 s of them, 10 to 100)")
    add("--no-peers", action="store_true", help="leave torch's SDPA out")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print a JSON object")
    add("--md", action="store_true", help="print a Markdown table")
    add("--csv", action="store_true", help="print comma-separated values; not of FLASH_ATTN_BACK")
    add(
        "-o",
        "--output-file",
        type=OutputFile,
        metavar="FILE",
        help="write the report there, and the plain table to the screen",
    )


def main(args: argparse.Namespace) -> int:
    if args.op.upper() == VARLEN:
        return _varlen(args)
    if args.op.upper() == BACKWARD and args.model is not None:
        raise GraphError(f"--model is for FLASH_ATTN_EXT and {VARLEN}, got {BACKWARD}; leave it out")
    if args.op.upper() == BACKWARD and not args.csv:
        return _backward(args)
    if args.csv and args.op.upper() == BACKWARD:
        raise GraphError(f"--csv is not for {BACKWARD}; use --json or --md")
    shapes = shapes_of(args.op, args.set, args.shape, args.model)
    if args.list:
        _list(args, shapes)
        return 0
    if args.tiny:
        shapes = tiny(shapes)
    backend = _backend(args)
    if args.output_file is not None:
        open(args.output_file, "a", encoding="utf-8").close()  # what can't be written must show before the measuring
    report = _measure_all(args, backend, shapes)
    _write(args, report)
    return report.exit_code


def _varlen(args: argparse.Namespace) -> int:
    """Attention over pages: tables of its own."""
    import torch

    from graphrt.tools.bench import varlen, varlen_shapes
    from graphrt.tools.bench.machine import on_gpu, versions
    from graphrt.tools.bench.timing import CudaClock, HostClock, ceilings

    shapes = varlen_shapes.shapes_of(args.shape, args.model)
    if args.list:
        print_table(
            ["table", "shape", "model", "beside"], [[s.table, s.name, s.model, s.beside or "-"] for s in shapes]
        )
        return 0
    backend = _backend(args)
    cuda = on_gpu(backend)
    cache = torch.cuda.get_device_properties(0).L2_cache_size if cuda else 0
    clock: Clock = CudaClock() if cuda else HostClock()
    _say(_CEILINGS)
    before = ceilings(cuda)
    rows = varlen.measure(
        varlen_shapes.tiny(shapes) if args.tiny else shapes, backend, clock, cache, args.repetitions,
        lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    best = before.best(ceilings(cuda))
    product = best.tflop_per_s.get("f16") or max(best.tflop_per_s.values())
    form = "csv" if args.csv else "md" if args.md else "table"
    if args.json:
        machine, said = versions(backend), {"copy_gb_per_s": best.copy_gb_per_s, "tflop_per_s": best.tflop_per_s}
        text = json.dumps({"machine": machine, "ceilings": said, "results": varlen.as_json(rows)}, indent=1)
    else:
        text = "\n".join(varlen.lines(rows, form, best.copy_gb_per_s, product))
    if args.output_file is not None:
        write_text(args.output_file, text + "\n")
    print(text)
    return 1 if varlen.failed(rows) else 0


def _backward(args: argparse.Namespace) -> int:
    """Gradients of attention, in several forms: a table of its own."""
    from graphrt.backend import get_backend
    from graphrt.tools.bench import back_shapes, backward
    from graphrt.tools.bench.machine import on_gpu, versions
    from graphrt.tools.bench.timing import CudaClock, HostClock, ceilings

    shapes = back_shapes.shapes_of(args.shape)
    if args.list:
        print_table(["shape", "form", "beside"], [[s.name, s.form, s.beside or "-"] for s in shapes])
        return 0
    backend = _backend(args)
    cuda, forms = on_gpu(backend), {"split": backend}

    def backend_of(form: str) -> Backend:
        if backend.name == "triton" and form not in forms:
            forms[form] = get_backend(backend.id, backward=form)
        return forms.get(form, backend)

    clock: Clock = CudaClock() if cuda else HostClock()
    _say(_CEILINGS)
    before = ceilings(cuda)
    rows = backward.measure(
        back_shapes.tiny(shapes) if args.tiny else shapes, backend_of, clock, cuda, args.repetitions,
        not args.no_peers, lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    best = before.best(ceilings(cuda))
    product = best.tflop_per_s.get("f16") or max(best.tflop_per_s.values())
    if args.json:
        machine, said = versions(backend), {"copy_gb_per_s": best.copy_gb_per_s, "tflop_per_s": best.tflop_per_s}
        text = json.dumps({"machine": machine, "ceilings": said, "results": backward.as_json(rows)}, indent=1)
    else:
        text = "\n".join(backward.lines(rows, "md" if args.md else "table", product))
    if args.output_file is not None:
        write_text(args.output_file, text + "\n")
    print(text)
    return 1 if backward.failed(rows) else 0


def _list(args: argparse.Namespace, shapes: list[Shape]) -> None:
    rows = [[s.name, s.set, "-" if s.llama is None else f"{s.llama:g}", s.first or "-", s.goal or "-"] for s in shapes]
    columns = ["shape", "set", "llama.cpp", "first", "goal"]
    if args.json:
        print_json([dict(zip(columns, map(str, row))) for row in rows])
    else:
        print_table(columns, rows)


def _backend(args: argparse.Namespace) -> Backend:
    """The backend that the options name. Raises BackendError without a GPU, where none but the default one is asked."""
    import torch

    from graphrt.backend import get_backend
    from graphrt.tools.conformance.cases.sources import make_backend

    cuda = torch.cuda.is_available()
    if args.backend is None and not cuda and not args.tiny:
        raise BackendError(
            "`bench op` measures on a CUDA GPU, torch finds none here; run it on a machine with a GPU, or try it out "
            "with --tiny, or name a backend with -b"
        )
    name = args.backend or ("triton" if cuda else "cpu")
    if args.schedule is None:
        return make_backend(name)
    if ":" in name:
        raise GraphError(f"--schedule is for a backend that is named, got -b {name!r}; install it, or leave one out")
    return get_backend(name, schedule=args.schedule)


@dataclass(frozen=True)
class _Bench:
    """What stays the same from shape to shape. device: torch's; cache_bytes: the device's last-level cache."""

    backend: Backend
    device: str
    clock: Clock
    noise: Noise
    cache_bytes: int
    repetitions: int | None
    peers: bool
    tiny: bool

    def measure(self, shape: Shape) -> Row:
        """One shape's row; whatever is raised on the way becomes one too, so that the others go on."""
        from graphrt.tools.bench.op_report import Row

        try:
            return self._measure(shape)
        except UnsupportedError as error:
            return Row(shape, "unsupported", _one_line(error))
        except Exception as error:  # a compiler's, a driver's, lack of memory: a backend may raise anything
            return Row(shape, "failed", f"{type(error).__name__}: {_one_line(error)}")
        finally:
            self._tidy()

    def _measure(self, shape: Shape) -> Row:
        import graphrt
        from graphrt.op import op_spec
        from graphrt.tools.bench.op_check import check
        from graphrt.tools.bench.op_inputs import build, n_nodes_for
        from graphrt.tools.bench.op_report import PeerTime, Row, measured

        n_nodes = 3 if self.tiny else n_nodes_for(shape, self.cache_bytes)
        program = build(shape, n_nodes, self.noise)
        exe = graphrt.prepare(program.graph, self._backend_of(shape))
        program.fill(exe)
        for _ in range(WARM_UP_RUNS):
            exe.run()
        checked = check(program, exe, self.device)
        if checked.wrong:
            return Row(shape, "wrong", checked.wrong)
        times, peers = self._times(shape, exe, n_nodes)
        flops = op_spec("FLASH_ATTN_EXT").work(program.fused[program.nodes[0]]).flops * shape.counted
        moved = sum(op_spec(n.op).work(n).bytes for n in program.graph.nodes) / n_nodes
        row = measured(shape, times, n_nodes, flops, moved, checked.error)
        held = sum(arena.buffer.nbytes for arena in exe.arenas.values())
        row.memory = max(0, held - sum(leaf.data_nbytes for leaf in exe.graph.inputs))
        row.cost = _cost(exe, shape.form)
        if shape.is_decode and shape.llama is not None and shape.cache_bytes < 2 * self.cache_bytes:
            row.reused = self._reused(shape)
        for name, peer in peers.items():
            said, taken = (peer, None) if isinstance(peer, str) else (peer.form, peer.taken)
            row.peers[name] = PeerTime(taken.median / n_nodes if taken else None, said)
        return row

    def _backend_of(self, shape: Shape) -> Backend:
        """The backend, or one of its kind that the shape's form is asked of. (The CPU has no such forms: it serves.)"""
        from graphrt.backend import get_backend

        asked = bool(shape.form) and self.backend.name == "triton"
        return get_backend(self.backend.id, schedule=shape.form) if asked else self.backend

    def _reused(self, shape: Shape) -> float:
        """Seconds of one op where all read one cache, which the device's own may hold."""
        import graphrt
        from graphrt.tools.bench.op_inputs import DECODE_NODES, build
        from graphrt.tools.bench.timing import runs_for

        n_nodes = DECODE_NODES[1]
        program = build(shape, n_nodes, self.noise, one_cache=True)
        exe = graphrt.prepare(program.graph, self.backend)
        program.fill(exe)
        runs = self.repetitions or runs_for(self.clock.times(exe.run, WARM_UP_RUNS, exe.synchronize).median)
        return self.clock.times(exe.run, runs, exe.synchronize).median / n_nodes

    def _times(self, shape: Shape, exe: Any, n_nodes: int) -> tuple[Times, dict[str, Any]]:
        """Ours and the peers', in turn."""
        from graphrt.tools.bench.timing import Times, runs_for

        n = self.repetitions or runs_for(self.clock.times(exe.run, WARM_UP_RUNS, exe.synchronize).median)
        peers: dict[str, Any] = {}
        if self.peers and not shape.form:
            from graphrt.tools.bench.torch_flex import flex_peers
            from graphrt.tools.bench.torch_sdpa import sdpa_peers

            peers = sdpa_peers(shape, n_nodes, self.clock) | flex_peers(shape, n_nodes, self.clock)
        times = Times([])
        for i in range(min(ROUNDS, n)):
            part = (n + i) // min(ROUNDS, n)
            times += self.clock.times(exe.run, part, exe.synchronize)
            for peer in peers.values():
                if not isinstance(peer, str):
                    peer.measure(self.clock, part)
        return times, peers

    def _tidy(self) -> None:
        if self.device == "cuda":  # the next shape needs the memory
            import torch

            gc.collect()
            torch.cuda.empty_cache()


def _cost(exe: Any, form: str) -> str:
    """What `explain` says that a form of flash decoding costs, "" where none was asked for."""
    choices = (step.choice for split in exe.splits for step in split.run.steps if form and step.choice is not None)
    said = (line for choice in choices for what, line in choice.facts() if what == "cost")
    return next((line.removeprefix(f"{form}: ") for line in said if line.startswith(f"{form}: ")), "")


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "no message")[:300]


def _measure_all(args: argparse.Namespace, backend: Backend, shapes: list[Shape]) -> Report:
    import torch

    from graphrt.tools.bench.machine import on_gpu, versions
    from graphrt.tools.bench.op_inputs import Noise
    from graphrt.tools.bench.op_report import Report, judge_marks
    from graphrt.tools.bench.timing import CudaClock, HostClock, ceilings

    cuda = on_gpu(backend)
    cache = torch.cuda.get_device_properties(0).L2_cache_size if cuda else 0
    clock: Clock = CudaClock() if cuda else HostClock()
    bench = _Bench(
        backend,
        "cuda" if cuda else "cpu",
        clock,
        Noise(),
        cache,
        args.repetitions,
        cuda and not args.no_peers,
        args.tiny,
    )
    _say(_CEILINGS)
    before = ceilings(cuda)
    rows = []
    for i, shape in enumerate(shapes):
        _say(f"[{i + 1}/{len(shapes)}] {shape.name}: compiling, checking, timing ...")
        rows.append(bench.measure(shape))
        _say(f"[{i + 1}/{len(shapes)}] {_shown(rows[-1])}")
    judge_marks(rows)
    return Report(args.op.upper(), backend.name, versions(backend), before, ceilings(cuda), rows, args.tiny)


def _say(text: str) -> None:
    """What is being done, at once: a benchmark that is silent for half a minute is taken for one that hangs."""
    print(text, file=sys.stderr, flush=True)


def _shown(row: Row) -> str:
    """A row as it comes, so that a run that is cut short has told something."""
    if row.seconds is None:
        return f"{row.shape.name}: {row.status}, {row.message}"
    return f"{row.shape.name}: {1e6 * row.seconds:.1f} us, {row.tflop_per_s:.3g} TFLOP/s, {row.gb_per_s:.0f} GB/s"


def _write(args: argparse.Namespace, report: Report) -> None:
    if args.output_file is None:
        if args.json:
            print_json(report.as_json())
        else:
            print("\n".join(report.csv() if args.csv else report.lines(args.md)))
        return
    lines = report.csv() if args.csv else report.lines(args.md)
    text = json.dumps(report.as_json(), indent=1) if args.json else "\n".join(lines)
    write_text(args.output_file, text + "\n")
    print("\n".join(report.lines(markdown=False)))
