"""Answer requests over HTTP as OpenAI's API has them, many at once: /v1/chat/completions, /v1/completions,
/v1/embeddings and more (docs/serving.md). Without MODEL the demo model is served, pulled when absent. SIGTERM and
Ctrl-C end it once the requests that it has are answered."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrt.errors import SessionError
from graphrt.models.grammar import the_llguidance
from graphrt.models.hub_known import DEFAULT_MODEL, KNOWN
from graphrt.models.synthetic_recipes import RECIPES
from graphrt.tools.adapter_flags import add_adapter_arguments
from graphrt.tools.common import (
    MODEL_HELP,
    add_fast_argument,
    add_session_arguments,
    add_template_argument,
    add_tp_argument,
    load_model,
    over_ranks,
    read_text,
    session_options,
    size,
    use_template,
    whole,
)
from graphrt.tools.outputs import OutputFile
from graphrt.tools.sampling.flags import TEXT_FLAGS as TEXT_FLAGS
from graphrt.tools.sampling.flags import add_sampling_arguments, sampler_params

if TYPE_CHECKING:
    from graphrt.models.draft import Drafter
    from graphrt.models.engine_paged import PagedEngine
    from graphrt.models.guesses import Drafts
    from graphrt.models.hparams import HParams
    from graphrt.models.model import Model
    from graphrt.models.rerank import Ranker
    from graphrt.ranks import Ranks
    from graphrt.tools.serve.scheduler import Scheduler
    from graphrt.tools.serve.state import Embed, Embedder, State

#: Texts that are made at once, unless told.
PARALLEL = 8
#: Whole contexts that the cache holds for all of them, unless told, and tokens for each: few texts are as long as they
#: may be.
CONTEXTS, EACH = 4, 1024
#: Tokens that a draft model guesses at a time, unless told.
DRAFTED = 8
#: Bytes of what prompts began with that a file keeps, unless told.
KEPT = 1 << 30
#: Tokens of a page: the end of a prompt that isn't a whole page is read anew for each text.
PAGE = 64
#: An --alias that stands for all names.
ANY_NAME = "*"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    made_up = f"random weights in a known shape instead, to measure with: {', '.join(RECIPES)}, with :q4_k_m behind"
    parser.add_argument("--synthetic", metavar="NAME", help=made_up)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: 127.0.0.1)")
    group.add_argument(
        "--port", type=whole(0, 65535), default=8080, metavar="N", help="0: any free one (default: 8080)"
    )
    names = "what requests call the model, with commas between several names, * for whatever they call it (default: "
    names += "its file's name)"
    group.add_argument("-a", "--alias", metavar="NAME", help=names)
    keys = "a key that requests must have; several times, or with commas between, for several"
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help=keys)
    group.add_argument("--api-key-file", metavar="FILE", help="the same, a key a line")
    pages = "sites whose pages may ask, https://chat.example, with commas between, localhost: pages of this machine at "
    pages += "any port, or *: all (default: none)"
    group.add_argument("--cors-origins", default="", metavar="LIST", help=pages)
    many = f"texts that are made at once; others wait (default: {PARALLEL})"
    group.add_argument("-np", "--parallel", type=whole(1, 4096), default=PARALLEL, metavar="N", help=many)
    total = f"tokens that the cache holds for all texts together (default: {CONTEXTS} contexts, or {EACH} for each)"
    group.add_argument("--max-total-tokens", type=whole(1), metavar="N", help=total)
    predict = "the most tokens of a text, whatever is asked for, -1: no limit (default)"
    group.add_argument("-n", "--predict", type=whole(-1), default=-1, metavar="N", help=predict)
    add_template_argument(group)
    variables = (
        'a JSON object that a chat template may read, unless a request says otherwise: {"enable_thinking": false}'
    )
    group.add_argument("--chat-template-kwargs", type=json_object, default={}, metavar="JSON", help=variables)
    group.add_argument("--pooling", default="", metavar="KIND", help="of embeddings (default: what the file names)")
    body = "bytes that a request may have (default: 16 MiB)"
    group.add_argument("--max-body", type=whole(1024), default=16 << 20, metavar="N", help=body)
    late = "seconds in which a request must come, and in which something of an answer must be taken (default: 30)"
    group.add_argument("-to", "--timeout", type=whole(1), default=30, metavar="N", help=late)
    queue = "texts that may wait for their turn; more are told to come again (default: 1024)"
    group.add_argument("--max-queue", type=whole(0), default=1024, metavar="N", help=queue)
    of_key = (
        "texts of one API key (without keys: address) that may wait or be made; more are told to come again (default: "
        "0, any number)"
    )
    group.add_argument("--max-per-key", type=whole(0), default=0, metavar="N", help=of_key)
    drain = "seconds that SIGTERM waits for requests to end, 0: as long as they take (default)"
    group.add_argument("--shutdown-timeout", type=whole(0), default=0, metavar="N", help=drain)
    guessed = "tokens that are guessed at a time from where a text's last ones stood before (default: 0, none)"
    group.add_argument("--lookup", type=whole(0, 32), default=0, metavar="N", help=guessed)
    draft = "a smaller model of the same vocabulary that guesses tokens: a file, or as MODEL"
    group.add_argument("-md", "--model-draft", metavar="MODEL", help=draft)
    drafted = f"tokens of a text that it guesses at a time, at most (default: {DRAFTED})"
    group.add_argument("--draft-max", "--draft", type=whole(1, 32), default=DRAFTED, metavar="N", help=drafted)
    same = "a text's tokens and log-probabilities are the same bits whatever else is made: slower"
    group.add_argument("--deterministic", action="store_true", help=same)
    no_warm_up = "answer at once: the first requests then wait for kernels of a GPU to be compiled"
    group.add_argument("--no-warmup", action="store_true", help=no_warm_up)
    group.add_argument("--log-json", action="store_true", help="log lines are JSON objects")
    group.add_argument("--exact", action="store_true", help="only reference forms of the ops: slower, to compare with")
    add_fast_argument(parser)
    kept = (
        "keep what prompts begin with in this file between two servers: it is written when nothing is asked for some "
        "seconds, once a minute at most (not over several ranks), and when the server ends"
    )
    group.add_argument("--prompt-cache", type=OutputFile, metavar="FILE", help=kept)
    limit = f"bytes of it at most, what was used last (default: {KEPT >> 30}G)"
    group.add_argument("--prompt-cache-size", type=size, default=KEPT, metavar="SIZE", help=limit)
    beside = "a model that gives the vectors of /v1/embeddings beside MODEL: a file, or as MODEL"
    group.add_argument("--embedding-model", metavar="MODEL", help=beside)
    add_tp_argument(parser)
    add_session_arguments(parser)
    add_adapter_arguments(parser)
    none = "adapters have the scale 0 unless a request says otherwise"
    parser.add_argument("--lora-init-without-apply", action="store_true", help=none)
    add_sampling_arguments(parser)


def json_object(given: str) -> dict[str, Any]:
    """Raises argparse's error for what is none."""
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object, as {{"enable_thinking": false}}, got {given[:80]!r}')
    return found


def main(args: argparse.Namespace) -> int:
    try:
        import graphrt.tools.serve.run  # noqa: F401
    except ImportError as error:
        raise SessionError(
            f"a server needs packages that are not installed ({error.name}); pip install 'graphrt[serve]'"
        ) from error
    the_llguidance()
    if args.synthetic and args.model:
        raise SessionError("one model may be served, got MODEL and --synthetic; leave one of them out")
    if args.lookup and args.model_draft:
        raise SessionError("tokens are guessed in one way, got --lookup and --model-draft; leave one of them out")
    if args.deterministic and args.prompt_cache is not None:
        raise SessionError("--deterministic reads every prompt anew, got --prompt-cache; leave one of them out")
    if args.deterministic and (args.lookup or args.model_draft):
        raise SessionError("--deterministic reads no guesses, got --lookup or --model-draft; leave one of them out")
    if args.chat_template_file is not None:
        read_text(args.chat_template_file)  # whether it can be read is known before the model is
    if over_ranks(args):
        from graphrt.tools.ranks.launch import run_on_ranks

        return run_on_ranks("serve", args, serve, lambda: "", lambda: None, listens=listen)
    return serve(args)


def serve(args: argparse.Namespace, _: str = "") -> int:
    """Serves, or as one of several ranks that isn't the first does what that one does. The exit code."""
    from graphrt.tools.ranks.member import last_words
    from graphrt.tools.serve import run
    from graphrt.tools.serve.kept_prompts import KeptPrompts
    from graphrt.tools.serve.logs import setup_logging

    ranks: Ranks | None = getattr(args, "as_ranks", None)
    sampling, keys, origins = sampler_params(args), api_keys(args), origins_of(args)
    listening = getattr(args, "listening", None)
    if ranks is not None and ranks.rank:
        if listening is not None:
            listening.close()
        return _follow(ranks, args)
    with listening or listen(args.host, args.port) as listening:
        model = load_model(args, args.exact)
        use_template(model, args)
        host, port = listening.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        state = made_state(model, args, sampling)
        setup_logging(as_json=args.log_json)
        last_words.append(partial(_give_up, state))
        ready = getattr(args, "on_ready", lambda: None)
        with kept_prompts(state.worker.scheduler, ranks, args):
            if args.prompt_cache is not None and state.worker.scheduler is not None and ranks is None:
                path = Path(args.prompt_cache)
                state.worker.kept = KeptPrompts(state.worker.scheduler, path, args.prompt_cache_size)
            return run.run(state, keys, listening, address, args.shutdown_timeout, ready, origins)


def _follow(ranks: Ranks, args: argparse.Namespace) -> int:
    from graphrt.tools.serve.ranks import follow

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which torchrun and systemd send to all; the first rank drains
    model = load_model(args, args.exact)
    scheduler = scheduler_of(model, args)
    with kept_prompts(scheduler, ranks, args):
        follow(ranks, model, scheduler, embed_of(model, args))
    return 0


def _give_up(state: State, text: str) -> None:
    """Before this process ends since another rank hangs: whoever waits for an answer is told why."""
    from graphrt.errors import RankError

    state.worker.give_up(RankError(text))
    time.sleep(1)  # answers go out


@contextmanager
def kept_prompts(scheduler: Scheduler | None, ranks: Ranks | None, args: argparse.Namespace) -> Iterator[None]:
    """--prompt-cache: the engine knows what the file has, and the file what the engine knows in the end; several ranks
    have a file each. What fails of that is a warning: a server starts and ends without."""
    from graphrt.models.prefix_file import load_prefixes, save_prefixes
    from graphrt.models.ranks.prefixes import load_on_all, save_on_all
    from graphrt.tools.prompt_cache import path_of

    log = logging.getLogger("graphrt.serve")
    if args.prompt_cache is None or scheduler is None:
        yield
        return
    engine, path = scheduler.engine, path_of(Path(args.prompt_cache), ranks)
    load = load_prefixes if ranks is None else partial(load_on_all, ranks)
    save = save_prefixes if ranks is None else partial(save_on_all, ranks)
    try:
        log.info("%d tokens of prompts are known from %s", load(engine, path), path.name)
    except SessionError as error:
        log.warning("%s", error)
    yield
    try:
        kept = save(engine, path, args.prompt_cache_size)
        log.info("%d tokens of prompts are kept in %s", kept, path.name)
    except SessionError as error:
        log.warning("%s", error)


def api_keys(args: argparse.Namespace) -> list[str]:
    """Those of --api-key and --api-key-file. Raises SessionError for an empty one."""
    given = [key for text in args.api_key for key in text.split(",")]
    if args.api_key_file is not None:
        given += [line for line in read_text(args.api_key_file).splitlines() if line.strip()]
        if not given:
            raise SessionError(f"a file of API keys must have one, {args.api_key_file!r} has none; write one a line")
    keys = [key.strip() for key in given]
    if not all(keys):
        raise SessionError("an API key must have a character, got an empty one; leave --api-key out for no keys")
    return keys


def origins_of(args: argparse.Namespace) -> list[str]:
    """Those of --cors-origins. Raises SessionError for what no browser says."""
    found = [each.strip() for each in args.cors_origins.split(",") if each.strip()]
    for each in found:
        scheme, _, place = each.partition("://")
        if each not in ("*", "null", "localhost") and not (scheme and place and "/" not in place.rstrip("/")):
            raise SessionError(
                f"an origin must be as https://chat.example, or *, null or localhost, got {each!r}; give no path"
            )
    return found


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections, which wait until the model is loaded. Raises SessionError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SessionError(
            f"a server must be able to listen, and can't at {host}:{port}: {reason}; give others with --host and --port"
        ) from error


def made_state(model: Model, args: argparse.Namespace, sampling: Any) -> State:
    """What the routes need: an engine for a decoder; an encoder gives embeddings alone."""
    from graphrt.tools.serve.adapters import ServedAdapters
    from graphrt.tools.serve.metrics import Metrics
    from graphrt.tools.serve.ranks import Leader
    from graphrt.tools.serve.state import Limits, State
    from graphrt.tools.serve.texts import Maker
    from graphrt.tools.serve.worker import Worker

    names, limits = names_of(model, args), Limits(args.max_body, args.timeout, args.max_queue, args.max_per_key)
    metrics = Metrics(names[0])
    at_once = args.parallel + args.max_queue  # texts that can be there at once
    scheduler, embed = scheduler_of(model, args), embed_of(model, args)
    leader = Leader(model.ranks, scheduler) if model.ranks is not None else None
    maker = adapters = None
    if scheduler is not None and model.decoder.adapters is not None:
        adapters = ServedAdapters(names, model.decoder.adapters.names, model.decoder.adapters.scales)
    if scheduler is not None:
        maker = Maker(
            model, sampling, scheduler.most_tokens, args.predict, at_once, adapters, args.chat_template_kwargs
        )
        assert model.chat_template is None or model.chat_template.source  # one that can't be used is told of now
    worker = Worker(scheduler, metrics, args.max_queue, leader)
    embed = embed if leader is None else leader.embeds(embed)
    any_name = ANY_NAME in map(str.strip, (args.alias or "").split(","))
    embedders = embedders_of(args, names)
    ranker = ranker_of(model, args) if leader is None else None
    return State(
        model, names, worker, maker, metrics, limits, embed, embedders=embedders, any_name=any_name, own_ranker=ranker
    )


def scheduler_of(model: Model, args: argparse.Namespace) -> Scheduler | None:
    """What makes the texts of a decoder, None of an encoder."""
    from graphrt.models.arch.skeleton import Decoder
    from graphrt.models.guesses import Pace
    from graphrt.tools.serve.scheduler import Scheduler

    if not isinstance(model.network, Decoder):
        return None
    drafter = drafts_of(model, args)
    most = args.draft_max if drafter is not None else args.lookup
    return Scheduler(engine_of(model, args), most, drafter, Pace(), deterministic=args.deterministic)


def embed_of(model: Model, args: argparse.Namespace) -> Embed:
    """What gives vectors of a model."""
    return lambda ids: model.embed(ids, args.pooling, n_batch=args.batch_size)


def ranker_of(model: Model, args: argparse.Namespace) -> Ranker | None:
    """What ranks texts by a model, None where it has no head for that."""
    from graphrt.models.rerank import Ranker, has_head

    return Ranker(model, args.batch_size) if has_head(model) else None


def embedders_of(args: argparse.Namespace, taken: Sequence[str]) -> dict[str, Embedder]:
    """The model that --embedding-model names, by the names that requests may call it. Raises SessionError for one
    without a pooling, or of MODEL's name."""
    from graphrt.models.embed import check_pooling
    from graphrt.models.rerank import has_head
    from graphrt.tools.serve.state import Embedder

    if not args.embedding_model:
        return {}
    asked = beside(args, args.embedding_model)
    model = load_model(asked, args.exact)
    if not has_head(model):
        check_pooling(args.pooling, model.network.hp.pooling)
    names = names_of(model, asked)
    if set(names) & set(taken):
        raise SessionError(f"models must have names of their own, both are called {names[-1]!r}; give MODEL an --alias")
    return dict.fromkeys(names, Embedder(model, embed_of(model, args), ranker_of(model, args)))


def names_of(model: Model, args: argparse.Namespace) -> list[str]:
    """What requests may call the model: as the command line did, or by its file, unless --alias says how; that it may
    have any name is no name. Raises SessionError for an empty one."""
    if args.alias is not None:
        names = [each.strip() for each in args.alias.split(",")]
        if not all(names):
            raise SessionError(f"a model's name must have a character, got {args.alias!r}; leave --alias out for none")
        own = [name for name in dict.fromkeys(names) if name != ANY_NAME]
        if own:
            return own
    if args.synthetic:
        return [args.synthetic]
    asked = getattr(args, "asked", args.model)  # of several ranks all have the file's path in its place
    known = [asked or DEFAULT_MODEL] if asked in (None, *KNOWN) else []
    return [*known, *(path.stem for path in map(Path, model.file.paths[:1]))]


def beside(args: argparse.Namespace, model: str) -> argparse.Namespace:
    """The arguments for a model beside MODEL. It has no adapters, and of several ranks the first one has it whole."""
    changed: dict[str, Any] = {
        "model": model, "asked": model, "synthetic": None, "alias": None, "lora": [], "lora_scaled": [], "as_ranks": 1,
    }  # fmt: skip
    return argparse.Namespace(**vars(args) | changed)


def drafts_of(model: Model, args: argparse.Namespace) -> Drafts | None:
    """What guesses tokens, where --model-draft asks for it. Raises SessionError."""
    from graphrt.models.ranks.drafts import FirstRanksDrafts

    if not args.model_draft:
        return None
    if model.ranks is None:
        return drafter_of(model, args)
    return FirstRanksDrafts(model.ranks, None if model.ranks.rank else drafter_of(model, args))


def drafter_of(model: Model, args: argparse.Namespace) -> Drafter:
    """The model of --model-draft: its cache holds as many tokens as the model's. Raises SessionError."""
    from graphrt.models.draft import Drafter, check_vocabularies

    draft = load_model(beside(args, args.model_draft), args.exact)
    check_vocabularies(draft.tokenizer, model.tokenizer)
    return Drafter(engine_of(draft, args, most=model.decoder.hp), model.network.hp.n_vocab)


def engine_of(model: Model, args: argparse.Namespace, most: HParams | None = None) -> PagedEngine:
    """The sequences of all texts. most: of the model whose context they have, at most, where it is another one. Raises
    SessionError, MemoryPlanError."""
    from graphrt.models.engine import check_options
    from graphrt.models.engine_paged import PagedEngine
    from graphrt.models.warm_up import warm_up

    options = session_options(args)
    n_ctx, _ = check_options(options, most or model.decoder.hp)
    usual = max(n_ctx * min(args.parallel, CONTEXTS), args.parallel * min(n_ctx, EACH))
    total = args.max_total_tokens or usual
    pages = max(1, -(-total // PAGE))
    if most is not None:
        options = replace(options, n_ctx=min(n_ctx, model.decoder.hp.n_ctx_train))
    options = replace(options, page=PAGE, n_pages=pages, share=not args.deterministic)
    engine = PagedEngine(model.decoder, model.backends, options, args.parallel)
    for sentence in engine.fallbacks():
        print(f"fallback: {sentence}", file=sys.stderr)
    if not args.no_warmup:
        guessed = (args.draft_max if args.model_draft else args.lookup) if most is None else 0
        warm_up(engine, alone=args.deterministic, most_guessed=guessed, clock=clock_of(model.ranks))
    return engine


def clock_of(ranks: Ranks | None) -> Callable[[], float]:
    """Seconds, by which ranks decide alike: the first one's."""
    return time.monotonic if ranks is None else lambda: float(ranks.told(time.monotonic()))
