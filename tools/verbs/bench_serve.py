"""Load on a server that speaks OpenAI's API: so many users who each ask again when they are answered (--users), or
requests that come at a rate (--rate). TARGET is the URL of any server, or a model that `graphrt serve` serves for this.

Prompts are random token ids, texts are as long as asked for (ignore_eos), and all is streamed: time to the first token,
time a token, tokens a second, by percentiles.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from graphrt.errors import SessionError
from graphrt.models.synthetic_recipes import RECIPES
from graphrt.progress import task
from graphrt.tools.common import print_json, print_table, whole, write_text
from graphrt.tools.outputs import OutputFile

#: Requests of a step of closed load, for each user.
EACH = 3
#: What a server says when it answers.
_READY = re.compile(r"served at (http://\S+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="?", metavar="TARGET", help="http://HOST:PORT, or a model to serve")
    made_up = f"serve random weights in a known shape: {', '.join(RECIPES)}"
    parser.add_argument("--synthetic", metavar="NAME", help=made_up)
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="options of the server that is started")
    add = parser.add_argument_group("load").add_argument
    add("--users", default="", metavar="N,..", help="closed loop: users that ask all the time (default: 1)")
    add("--rate", default="", metavar="N,..", help="open loop: requests a second")
    add("--lengths", default="128:256", metavar="IN:OUT", help="tokens of prompts and texts: 128:256 (default), "
        "sharegpt, or a file of two numbers a line; summary: an article each, and a summary of it")  # fmt: skip
    add("--requests", type=whole(1), metavar="N", help=f"of each step (default: {EACH} a user, or 10 seconds' worth)")
    add("--shared", type=whole(0), default=0, metavar="N", help="tokens that all prompts begin with (default: 0)")
    add("--temp", type=float, default=0.0, metavar="T", help="temperature (default: 0)")
    add("--body", default="{}", metavar="JSON", help="other fields of all requests, such as a json_schema")
    add("--seed", type=whole(0), default=0, metavar="N", help="of prompts, moments and sampling (default: 0)")
    add("--warm-up", type=whole(0), metavar="N", help="requests before each step that don't count (default: a user's)")
    add("--api-key", default="", metavar="KEY", help="of the server")
    add("--served-model", metavar="NAME", help="the model's name there (default: the first it names)")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print a JSON object")
    add("--svg", type=OutputFile, metavar="FILE", help="draw latency against load")


def main(args: argparse.Namespace) -> int:
    steps = [(True, n) for n in _numbers(args.users, "--users")]
    steps += [(False, n) for n in _numbers(args.rate, "--rate")]
    if (args.target is None) == (args.synthetic is None):
        raise SessionError("one server must be given: http://HOST:PORT, a model to serve, or --synthetic NAME")
    args.body = _fields(args.body)
    with _server(args) as url:
        report = asyncio.run(_measured(args, url, steps or [(True, 1.0)]))
    points = [(_named(step), step) for step in report["steps"]]
    if args.svg is not None:
        from graphrt.tools.bench.load_svg import picture

        write_text(args.svg, picture(f"{report['model']}, {args.lengths} tokens", points))
    if args.json:
        print_json(report)
    else:
        _print(report)
    return 0 if all(step["requests"] and not step["errors"] for step in report["steps"]) else 1


def _fields(text: str) -> dict[str, Any]:
    """Those of --body. Raises SessionError."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SessionError(f"--body must be a JSON object, as '{{\"top_k\": 20}}', got {text[:40]!r}")
    return found


def _numbers(text: str, flag: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",") if part]
    except ValueError:
        found = [0.0]
    whole_ones = flag != "--users" or all(n == int(n) for n in found)
    if not whole_ones or not all(0 < n <= 100_000 for n in found):
        raise SessionError(f"{flag} must be numbers over 0 with commas between, got {text[:40]!r}")
    return found


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """The server's address; one that is started here ends with this."""
    if args.target is not None and args.target.startswith(("http://", "https://")):
        yield args.target
        return
    what = ["--synthetic", args.synthetic] if args.synthetic else [args.target]
    command = [sys.executable, "-m", "graphrt", "serve", *what, "--port", "0", *shlex.split(args.serve)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = list[str]()
        for line in process.stderr:
            said.append(line)
            if ready := _READY.search(line):
                break
        else:
            raise SessionError(f"the server must begin to serve, it ended: {''.join(said)[-500:]}")
        with contextlib.ExitStack() as stack:
            drain = stack.enter_context(subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL))
            stack.callback(drain.kill)
            yield ready[1]
            process.terminate()
            process.wait(60)
    finally:
        process.kill()
        process.wait()


async def _measured(args: argparse.Namespace, url: str, steps: list[tuple[bool, float]]) -> dict[str, Any]:
    from graphrt.tools.bench.load import Ask, closed, opened, summary
    from graphrt.tools.bench.load_client import Server
    from graphrt.tools.bench.load_lengths import lengths_of
    from graphrt.tools.bench.load_server import as_json
    from graphrt.tools.bench.load_summaries import SUMMARY
    from graphrt.tools.bench.load_summaries import bodies as summaries

    server = Server(url, args.api_key)
    served = (await server.get("/v1/models"))["data"][0]
    n_vocab = (served.get("meta") or {}).get("n_vocab") or 1000
    ask = Ask(args.served_model or served["id"], n_vocab, args.shared, args.temp, args.seed, args.body)
    found, at = list[dict[str, Any]](), 0
    for is_closed, n in steps:
        count = args.requests or (EACH * int(n) if is_closed else max(1, round(10 * n)))
        warm = args.warm_up if args.warm_up is not None else int(n) if is_closed else 1
        if args.lengths == SUMMARY:
            bodies = await summaries(server, ask, at, warm + count)
        else:
            lengths = lengths_of(args.lengths, warm + count, args.seed)
            bodies = [ask.body(at + i, each) for i, each in enumerate(lengths)]
        at += len(bodies)
        await closed(server, bodies[:warm], max(1, warm), lambda n=1: None)
        what = f"{n:g} users" if is_closed else f"{n:g} requests/s"
        before = await server.text("/metrics")
        with task(what, count, "requests") as advance:
            rest = bodies[warm:]
            run = closed(server, rest, int(n), advance) if is_closed else opened(server, rest, n, args.seed, advance)
            answers = await run
        told = as_json(before, await server.text("/metrics"))
        found.append({"users" if is_closed else "rate": n, **summary(answers), **({"server": told} if told else {})})
    return {"url": url, "model": ask.model, "lengths": args.lengths, "shared": args.shared, "steps": found}


def _named(step: dict[str, Any]) -> str:
    return f"{step['users']:g} users" if "users" in step else f"{step['rate']:g}/s"


def _print(report: dict[str, Any]) -> None:
    from graphrt.tools.bench.load_server import rows as server_rows

    columns = ["load", "requests", "output t/s", "first token p50", "p95", "p99", "a token p50", "p95", "p99", "errors"]
    rows = []
    for step in report["steps"]:
        row = [_named(step), str(step["requests"]), f"{step.get('output_tokens_per_s', 0):.1f}"]
        for key in ("time_to_first_token_ms", "per_token_ms"):
            row += [f"{step[key][p]:.1f}" if key in step else "-" for p in ("p50", "p95", "p99")]
        rows.append([*row, str(step["errors"])])
    print_table(columns, rows)
    print(f"\n{report['model']} at {report['url']}, {report['lengths']} tokens; times in ms")
    for step in report["steps"]:
        if told := step.get("server"):
            print(f"\nWhere the server's time went, {_named(step)}; {told['steps_prepared']} sizes of steps were new\n")
            print_table(["", "times", "mean ms", "p50", "p95", "all, s"], server_rows(told))
    for step in report["steps"]:
        if "first_error" in step:
            print(f"{_named(step)}: {step['first_error']}", file=sys.stderr)
