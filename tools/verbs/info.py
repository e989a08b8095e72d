"""What a GGUF file holds: metadata, tensors by type, the memory that it needs, and the ops that its graphs use."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from graphrt.errors import SessionError
from graphrt.printing import brief_name, human_bytes, printable
from graphrt.tools.common import MODEL_HELP, add_page_arguments, context, print_json, print_table, whole

if TYPE_CHECKING:
    from graphrt.execute import Executable
    from graphrt.models.engine import SessionOptions
    from graphrt.models.gguf import GGUFFile
    from graphrt.models.model import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=context,
        default=0,
        metavar="N",
        help="context of the memory figures, 0: the model's own",
    )
    add_page_arguments(parser, "memory figures of an engine whose cache has pages of N tokens")
    parser.add_argument(
        "--sequences", type=whole(1), default=1, metavar="N", help="with --page: of so many sequences (default: 1)"
    )
    ranks = "how the model would be cut over N ranks, which need not be here"
    parser.add_argument("--ranks", type=whole(2, 64), metavar="N", help=ranks)
    stages = "with --ranks: in so many stages of a pipeline, of as many ranks each (default: 1)"
    parser.add_argument("--pp", type=whole(1, 64), default=1, metavar="M", help=stages)
    experts = "with --ranks: of a mixture of experts, each rank has some experts whole, not a part of every one"
    parser.add_argument("--ep", action="store_true", help=experts)


def main(args: argparse.Namespace) -> int:
    from graphrt.models import hub
    from graphrt.models.gguf import GGUFFile

    path = hub.resolve(args.model)
    with GGUFFile.open(path) as file:
        facts = {
            "path": str(path),
            "version": file.version,
            "byte_order": file.byte_order,
            "metadata": {key: _shown(file.metadata[key]) for key in file.metadata},
            "tensors": [
                {"name": t.name, "type": t.dtype.name, "ne": list(t.ne), "bytes": t.nbytes}
                for t in file.tensors.values()
            ],
            "needs": _needs(file, args),
        }
        if args.ranks:
            facts["ranks"], facts["cuts"] = _over_ranks(file, args)
    if args.json:
        print_json(facts)
    else:
        _print(facts, args.tensors)
    return 0


def _over_ranks(file: GGUFFile, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    from graphrt.models.engine import SessionOptions
    from graphrt.models.ranks.report import rank_needs

    needs, cuts = rank_needs(file, args.ranks, SessionOptions(args.ctx_size), args.pp, args.ep)
    return [asdict(each) for each in needs], [asdict(each) for each in cuts]


def _print_ranks(needs: list[dict[str, Any]], cuts: list[dict[str, Any]]) -> None:
    print()
    rows = [
        (c["count"], brief_name(c["name"]), c["by"], _dims(c["ne"]), "  ".join(map(_dims, c["parts"]))) for c in cuts
    ]
    print_table(("tensors", "name", "cut by", "shape", "shape on each rank"), rows)
    print()
    sizes = ("weights", "cache", "link")
    held = [[human_bytes(n[key]) if key in sizes else n[key] for key in n] for n in needs]
    names = ("rank", "stage", "first layer", "layers", "heads", "kv heads", "columns", "weights", "cache")
    print_table((*names, "link a token", "meetings"), held)


def _dims(ne: Sequence[int]) -> str:
    return "x".join(map(str, ne))


def _shown(value: Any) -> Any:
    """A key's value as JSON; long arrays by their first elements."""
    if isinstance(value, (np.ndarray, list)):
        head = [v.item() if isinstance(v, np.generic) else _text(v) for v in value[:5]]
        return head if len(value) <= 5 else {"length": len(value), "first": head}
    return _text(value)


def _text(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def _needs(file: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Memory in bytes and the ops of the decode graph, or the reason why graphrt can't run the model."""
    from graphrt.errors import GraphrtError
    from graphrt.models.engine import SessionOptions
    from graphrt.models.model import Model

    if not args.page and (args.pages or args.sequences > 1):
        raise SessionError("--pages and --sequences belong to pages, got no --page; give one, such as --page 64")
    options = SessionOptions(args.ctx_size, page=args.page, n_pages=args.pages)
    try:
        from graphrt.backend import get_backend

        model = Model(file, [get_backend("cpu")])
        held, size, exe = _one_token(model, options, args.sequences)
    except GraphrtError as error:
        return {"runs": False, "reason": str(error)}
    ops = Counter(node.op for node in exe.graph.nodes)
    return {
        "runs": True,
        "n_ctx": held,
        "weights_bytes": model.weights.nbytes,
        "cache_bytes": size,
        **({"page": args.page, "n_seq": args.sequences} if args.page and size else {}),
        "decode_bytes": sum(arena.plan.peak for arena in exe.arenas.values()),
        "ops": dict(sorted(ops.items())),
    }


def _one_token(model: Model, options: SessionOptions, n_seq: int) -> tuple[int, int, Executable]:
    """The context, the bytes of its cache, and the graph of one token: of a decode step, of each of n_seq sequences
    over pages, or of an encoder's text."""
    from graphrt.models.arch.encoder import Encoder
    from graphrt.models.embed import Embedder

    if isinstance(model.network, Encoder):
        return model.network.hp.n_ctx_train, 0, Embedder(model.network, model.backends).executable(1, 1, "none")
    holder = model.engine(n_seq, options) if options.page else model.session(options)
    return holder.n_ctx, holder.cache.nbytes, holder.executable(1, n_seq)


def _print(facts: dict[str, Any], every_tensor: bool) -> None:
    print(f"{facts['path']}: GGUF version {facts['version']}, {facts['byte_order']}-endian\n")
    print_table(("key", "value"), [(brief_name(key), _line(value)) for key, value in facts["metadata"].items()])
    tensors = facts["tensors"]
    total, counts = Counter[str](), Counter(t["type"] for t in tensors)
    for t in tensors:
        total[t["type"]] += t["bytes"]
    print()
    print_table(("type", "tensors", "size"), [(k, counts[k], human_bytes(n)) for k, n in total.most_common()])
    if every_tensor:
        print()
        print_table(("tensor", "type", "shape"), [(t["name"], t["type"], t["ne"]) for t in tensors])
    print()
    _print_needs(facts["needs"])
    if "ranks" in facts:
        _print_ranks(facts["ranks"], facts["cuts"])


def _print_needs(needs: dict[str, Any]) -> None:
    if not needs["runs"]:
        print(f"graphrt can't run it: {printable(needs['reason'].replace(chr(10), ' '))}")
        return
    pages = f" for {needs['n_seq']} sequences in pages of {needs['page']}" if "page" in needs else ""
    sizes = [("weights", "weights_bytes"), (f"cache of {needs['n_ctx']} tokens{pages}, f16", "cache_bytes")]
    sizes.append((f"compute, one token{' of each' if pages else ''}", "decode_bytes"))
    print_table(("memory", "size"), [(what, human_bytes(needs[key])) for what, key in sizes])
    print("\nops: " + ", ".join(f"{op} {n}" for op, n in needs["ops"].items()))


def _line(value: Any) -> str:
    if isinstance(value, dict):  # a long array, see _shown
        value = f"{value['length']} values: {', '.join(map(str, value['first']))}, ..."
    return brief_name(str(value), 100)
