"""Options and output that several verbs share."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from graphrt import startup, whole_files
from graphrt.dtypes import CACHE_TYPES
from graphrt.errors import BackendError, SessionError
from graphrt.presence import here
from graphrt.printing import human_bytes, terminal_text
from graphrt.printing import printable as printable
from graphrt.progress import task
from graphrt.ranks import in_environment
from graphrt.tools.adapter_flags import use_adapters
from graphrt.tools.rope_flags import add_rope_arguments, rope_options

if TYPE_CHECKING:
    import numpy.typing as npt

    from graphrt.backend import Backend
    from graphrt.models.engine import SessionOptions
    from graphrt.models.gguf import GGUFFile
    from graphrt.models.model import Model
    from graphrt.tools.inspect.played import Played


#: What the verbs call long work: graphrt.progress.task, which the command line shows.
progress = task

MODEL_NAMES = "a known name (smollm2-135m, gemma3-270m), hf:OWNER/REPO[:QUANT] or hf:OWNER/REPO/FILE"
MODEL_HELP = f"a .gguf file, {MODEL_NAMES}"
#: Of explain/devices.py, spelt out here since that takes long to import; a test holds them equal.
DEVICE_NAMES = "h100, h200, a100, b200, mi300x, l40s, rtx6000ada, rtx3090, rtx4090 or rtx5090"
#: models.engine.ATTN_PRECS, spelt out here for the same reason.
ATTN_PRECS = ("auto", "f32", "f8")
MAX_THREADS = 512
#: Values of a switch.
SWITCH = ("on", "off", "auto", "0", "1", "true", "false")


#: Units of sizes.
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(text: str) -> int:
    """Bytes of `8G`, `512MiB`, `1.5g` or `1000`; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    nbytes = float(match[1]) * UNITS[match[2].upper()] if match else 0
    if not 1 <= nbytes < math.inf:
        raise argparse.ArgumentTypeError(f"must be a size of at least a byte, such as 8G or 512M, got {text[:40]!r}")
    return int(nbytes)


def add_training_arguments(parser: argparse.ArgumentParser, tokens: str) -> None:
    """--train and --recompute. tokens: the option that says how long the text is."""
    parser.add_argument(
        "--train", metavar="lora:RANK",
        help=f"a step of training: adapters of that rank beside all linear layers, on a text of {tokens} tokens",
    )  # fmt: skip
    parser.add_argument(
        "--recompute", type=size, metavar="SIZE",
        help="with --train: its results may take SIZE, such as 12G; parts of the forward are computed again",
    )  # fmt: skip


def whole(low: int, high: float = math.inf) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`."""

    def number(text: str) -> int:
        bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, {bounds}, got {text[:40]!r}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {value}")
        return value

    return number


class Once(argparse.Action):
    """Stores a value, and refuses a second one: of two prompts one would be lost."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, "must be given once, got it twice")
        setattr(namespace, self.dest, values)


def utf8(text: str) -> str:
    """An argparse type: a text whose bytes are UTF-8. Python gives others as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        before = len(text[: error.start].encode("utf-8"))
        raise argparse.ArgumentTypeError(
            f"a text must be UTF-8, this one is not (byte {before}); convert it with iconv -t UTF-8"
        ) from None
    return text


def context(text: str) -> int:
    """An argparse type: the tokens of a context; 0 asks for the model's own."""
    return whole(0)(text) or -1  # OWN_CTX, whose module needs torch


def add_prompt_arguments(add: Callable[..., object]) -> None:
    """A prompt's flags, in a group whose add_argument it is."""
    given = "the prompt, - for standard input (the default when that is a pipe)"
    add("-p", "--prompt", metavar="TEXT", action=Once, type=utf8, help=given)
    add("-f", "--file", metavar="FILE", help="read the prompt from a file, but for its last newline")


def add_session_arguments(parser: argparse.ArgumentParser, ctx_size: int = 0, own_b: bool = False) -> None:
    """--backend, -c, -b, -ctk, -ctv, -t, -tb, and those of the rotation, which rope_options() reads.

    ctx_size: the default context, 0 for the model's own limit or 4096; own_b: the verb's -b names a backend, so that
    --backend is left out and a batch is --batch-size alone."""
    group = parser.add_argument_group("model")
    if not own_b:
        group.add_argument(
            "--backend",
            default="auto",
            metavar="NAME",
            help="what runs it; `graphrt devices` lists them (default: the best)",
        )
    unless = ctx_size or "the same, but at most 4096"
    what = f"the most tokens of prompt and text, 0: as many as the model was trained on (default: {unless})"
    group.add_argument("-c", "--ctx-size", type=context, default=ctx_size, metavar="N", help=what)
    batch = ("--batch-size",) if own_b else ("-b", "--batch-size")
    group.add_argument(
        *batch, type=whole(1), default=512, metavar="N", help="prompt tokens read at once (default: 512)"
    )
    for side, what in (("k", "keys"), ("v", "values")):
        flag, long = f"-ct{side}", f"--cache-type-{side}"
        kinds = f"the cache's type of {what}: {', '.join(CACHE_TYPES[:-1])} or {CACHE_TYPES[-1]} (default: f16)"
        group.add_argument(flag, long, default="f16", metavar="TYPE", help=kinds)
    group.add_argument(
        "-fa", "--flash-attn", type=switch, default=True, metavar="{on,off}",
        help="off: attention as three ops, scores and weights in memory between them, to compare (default: on)",
    )  # fmt: skip
    group.add_argument(
        "--attn-prec", choices=ATTN_PRECS, default="auto",
        help="what attention multiplies in: f32 rounds nothing on the way; f8, with -ctk f8 -ctv f8, lets an H100 "
        "round queries and weights to 8 bits too when it reads prompts (default: auto, the backend's choice)",
    )  # fmt: skip
    add_threads_argument(group)
    group.add_argument(
        "-tb", "--threads-batch", type=whole(-1, MAX_THREADS), default=0, metavar="N",
        help="CPU threads for reading prompts, 0 or -1 for as many as -t says (default)",
    )  # fmt: skip
    add_rope_arguments(parser)


def switch(text: str) -> bool:
    """`on` or `off`, as llama.cpp spells them; `auto` is on."""
    if text.lower() not in SWITCH:
        raise argparse.ArgumentTypeError(f"must be on or off, got {text[:40]!r}")
    return text.lower() not in ("off", "0", "false")


def add_page_arguments(parser: Any, what: str) -> None:
    """--page and --pages. what: the first one does."""
    parser.add_argument("--page", type=whole(1), default=0, metavar="N", help=what)
    parser.add_argument(
        "--pages", type=whole(1), default=0, metavar="N", help="with --page: how many (default: all whole contexts)"
    )


def add_template_argument(parser: argparse._ActionsContainer) -> None:
    """--chat-template-file."""
    template = "a file with the chat template to use instead of the model's own"
    parser.add_argument("--chat-template-file", metavar="FILE", help=template)


def use_template(model: Model, args: argparse.Namespace) -> None:
    """Has a model use the template of --chat-template-file, if it is given. Raises SessionError, ChatTemplateError."""
    if args.chat_template_file is not None:
        model.use_chat_template(read_text(args.chat_template_file))


def add_tp_argument(parser: argparse.ArgumentParser) -> None:
    """--tp and --pp: over how many ranks."""
    tp = "ranks on this host, each a process with a part of every weight (torchrun sets its own number; default: 1)"
    parser.add_argument("--tp", type=whole(1, 64), default=1, metavar="N", help=tp)
    pp = "stages of a pipeline, each with some of the layers and --tp ranks (default: 1)"
    parser.add_argument("--pp", type=whole(1, 64), default=1, metavar="M", help=pp)
    ep = "of a mixture of experts, give each of the --tp ranks some experts whole, not a part of every expert"
    parser.add_argument("--ep", action="store_true", help=ep)


def over_ranks(args: argparse.Namespace) -> bool:
    """Whether a verb is to run on several ranks: --tp or --pp says so, or torchrun has started this process."""
    return bool(args.tp * args.pp > 1) or in_environment()


def add_threads_argument(parser: Any) -> None:
    """-t: as llama.cpp has it, where numbers below 1 are the default."""
    parser.add_argument(
        "-t", "--threads", type=whole(-1, MAX_THREADS), default=0, metavar="N",
        help="CPU threads, 0 or -1 for as many as there are cores (default)",
    )  # fmt: skip


def add_fast_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fast",
        action="store_true",
        dest="eight_bits",
        help="round activations to 8 bits on the CPU, as llama.cpp does, not to 16: prompts and batches are up to 1.6 "
        "times as fast, and the logits' NMSE is 1e-4 to 2e-3, not 1e-8 to 1e-6",
    )


def rounding_backend(name: str, exact: bool) -> Backend:
    """What --fast asks for. Raises BackendError beside --exact, and for another backend than the CPU by name."""
    from graphrt.backend import get_backend

    if exact:
        raise BackendError("--fast rounds more and --exact nothing, got both; leave one out")
    if name not in ("auto", "cpu"):
        raise BackendError(f"--fast is for the CPU, which rounds to 16 bits else, got --backend {name}; leave one out")
    return get_backend("cpu", exact=False, activation_bits=8)


def alone_backend(name: str, exact: bool, bits: int) -> Backend:
    """What --deterministic asks for: a token's bits don't depend on others in its step. bits: that the CPU rounds
    activations to. Raises BackendError for a backend that has no such form."""
    from graphrt.backend import get_backend

    if name == "auto":
        name = get_backend().id
    if name == "cpu":
        return get_backend("cpu", exact=exact, activation_bits=bits, rows_alone=True)
    if name.partition(":")[0] == "triton":
        return get_backend(name, exact=exact, rows_alone=True)
    raise BackendError(f"--deterministic is for the CPU and a GPU by Triton, got --backend {name}; leave one out")


def load_model(
    args: argparse.Namespace, exact: bool, before: Callable[[GGUFFile, Sequence[Backend]], None] | None = None,
    played: Played | None = None,
) -> Model:  # fmt: skip
    """The model that `args.model` names, pulled if need be, or with a verb's --synthetic one that is made up. before:
    see models.load(); played: ranks that are played in this process."""
    from graphrt.models import hub
    from graphrt.models.model import load
    from graphrt.models.synthetic import synthetic
    from graphrt.models.synthetic_recall import recall

    use_threads(args)
    eight = getattr(args, "eight_bits", False)
    backend = rounding_backend(args.backend, exact) if eight else args.backend
    if getattr(args, "deterministic", False):
        backend = alone_backend(args.backend, exact, 8 if eight else 16)
    made_up = getattr(args, "synthetic", None)
    file: GGUFFile | Path
    if made_up:
        file = recall(made_up) if made_up.startswith("recall") else synthetic(made_up, vocabulary=True)
    else:
        file = hub.resolve(args.model)
    how: dict[str, Any] = {"ranks": getattr(args, "as_ranks", 1)}
    if played is not None:
        how = {"ranks": played.ranks, "stages": played.stages, "ep": played.ep}
    model = load(file, backend, exact=exact, rope=rope_options(args), before=before, **how)
    use_adapters(model, args)
    startup.done()
    return model


def use_threads(args: argparse.Namespace) -> None:
    """The number of CPU threads that -t asks for."""
    if args.threads > 0:
        from graphrt.backends.cpu import threads

        threads.use(args.threads)


def session_options(args: argparse.Namespace) -> SessionOptions:
    from graphrt.models.engine import SessionOptions

    threads = max(0, getattr(args, "threads_batch", 0))  # a verb that runs nothing has no such flag
    page, n_pages = getattr(args, "page", 0), getattr(args, "pages", 0)  # nor one that has no engine
    if n_pages and not page:
        raise SessionError("--pages says how many pages there are, got no --page; give their size, such as --page 64")
    types = args.cache_type_k, args.cache_type_v
    fused, prec = getattr(args, "flash_attn", True), getattr(args, "attn_prec", "auto")
    return SessionOptions(
        args.ctx_size, args.batch_size, *types, threads, page, n_pages, flash_attn=fused, attn_prec=prec
    )


def read_text(path: str) -> str:
    """A file's text as it stands, line ends and all; "-" for standard input. Raises SessionError."""
    name = "standard input" if path == "-" else repr(path)
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SessionError(
            f"a text must be UTF-8, {name} is not (byte {error.start}); convert it with iconv -t UTF-8"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SessionError(f"a text must be readable, {name} is not: {reason}; check the path") from error


def without_last_newline(text: str) -> str:
    """What llama.cpp takes of a file: editors and echo end it with a newline that belongs to no prompt."""
    return text.removesuffix("\n")


def check_writable(path: str) -> None:
    """Raises SessionError when a file of that name can't be written, as far as can be told without writing."""
    try:
        folder = Path(path).parent
        if Path(path).is_dir():
            raise not_writable(path, "it is a folder")
        if not folder.is_dir():
            raise not_writable(path, f"there is no folder {str(folder)!r}")
        if not os.access(path if Path(path).exists() else folder, os.W_OK):
            raise not_writable(path, "permission denied")
    except ValueError as error:  # a NUL
        raise not_writable(path, str(error)) from None


def not_writable(path: str, reason: str | None) -> SessionError:
    """The error for an output file that can't be written."""
    return SessionError(f"the output file must be writable, {path!r} is not: {reason}; give another")


def write_text(path: str | Path, text: str) -> None:
    """Writes a file as a whole, and says so. Raises SessionError where that can't be done."""
    try:
        with whole_files.writing(path) as out:
            out.write(text.encode())
    except OSError as error:
        raise not_writable(str(path), error.strerror) from error
    say_written(path)


def write_array(path: str, values: npt.NDArray[Any]) -> None:
    """Writes a .npy file as a whole, and says so. Raises SessionError where that can't be done."""
    import numpy as np

    try:
        with whole_files.writing(path) as out:
            np.save(out, values)
    except OSError as error:
        raise not_writable(path, error.strerror) from error
    say_written(path)


def say_written(path: str | Path) -> None:
    """One line on stderr: which file was written, and its size."""
    print(f"wrote {printable(str(path))}, {human_bytes(Path(path).stat().st_size)}", file=sys.stderr)


def print_text(text: str, out: TextIO | None = None) -> None:
    """Writes a model's text to stdout, or to another stream, at once: as it is, but to a terminal escaped."""
    out = out or sys.stdout
    with here.at_length():  # other ranks wait for a pipe that nobody reads
        out.write(terminal_text(text) if out.isatty() else text)
        out.flush()


def print_json(value: object) -> None:
    """One line of strict JSON: numbers that it can't spell become null; ASCII only where stdout takes no more. What is
    not printable, which could steer a terminal, is escaped."""
    value = _jsonable(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = json.dumps(value, allow_nan=False)
    print(text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text))


def _jsonable(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _jsonable(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a plain table."""
    for line in table_lines(columns, rows):
        print(line)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A plain table: the same on a terminal and in a pipe. Numbers are right-aligned, control characters escaped."""
    lines = []
    cells = [[printable(str(c)) for c in row] for row in rows]
    widths = [max(len(c), *(len(row[i]) for row in cells)) if cells else len(c) for i, c in enumerate(columns)]
    right = [bool(rows) and all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(columns))]
    for line in [list(columns), *cells]:
        shown = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right)]
        lines.append("  ".join(shown).rstrip())
    return lines


def markdown_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *rows]]
