"""Flags that people type from llama.cpp and that a verb here has not: what takes their place, or a sentence that says
what to do instead. A verb's own flags are never looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphrt.errors import SessionError
from graphrt.tools.common import SWITCH


@dataclass(frozen=True)
class Foreign:
    """What becomes of a flag. says: the sentence that is printed for it, "" for none; takes: its values; ours: the flag
    in whose place it stands, with its values; refused: the verb does not run, as its answer would be another one."""

    says: str
    takes: int = 0
    ours: str = ""
    refused: bool = False


def _idle(why: str, takes: int = 0) -> Foreign:
    return Foreign(f"changes nothing here: {why}", takes)


def _instead(what: str, takes: int = 0) -> Foreign:
    return Foreign(f"is not here: {what}", takes, refused=True)


_ONE_PLACE = "all layers run on the backend that --backend names, weights in a GPU's memory or mapped"
_MAPPED = "files are mapped, and read in place on a CPU"
_LOG = "figures go to stderr, and warnings alone are logged"
_ROPE = "verbs that run a model change its rotation when they load it, as `graphrt run` does; use one of these"
_CHAT = "`graphrt chat` is for conversations; `graphrt run -p TEXT` answers once, and with --raw completes the text"
_THREADS = "-t gives the threads of all work"

#: Its value may be left out.
_FLASH_ATTN = ("-fa", "--flash-attn")
#: Names with their aliases -> what becomes of each. Flags that choose the model or our own names come first.
_ROWS: dict[tuple[str, ...], Foreign] = {
    ("-hf", "-hfr", "--hf-repo"): Foreign("", 1, ours="hf:"),
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): Foreign("", 1, ours="--backend"),
    ("-dev", "--device"): _instead("--backend NAME says what runs a model, `graphrt devices` lists the names", 1),
    ("-no-cnv", "--no-conversation"): Foreign("", ours="--raw"),
    ("-sysf", "--system-prompt-file"): _instead('-sys "$(cat FILE)" gives a file\'s text', 1),
    ("--system-prompt",): Foreign("", 1, ours="--system"),
    ("--n-predict",): Foreign("", 1, ours="--predict"),
    ("--temperature",): Foreign("", 1, ours="--temp"),
    ("--typical-p",): Foreign("", 1, ours="--typical"),
    ("-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first", "-mli"): _instead(_CHAT),
    ("-st", "--single-turn"): _idle("run answers once"),
    ("--jinja",): _idle("a model's template is always rendered as Jinja"),
    ("--no-jinja",): _instead("a model's template is always rendered as Jinja; --raw leaves it out"),
    ("--chat-template", "--chat-template-file"): _instead(
        "the file's own template is used; chat and serve take another one from a file, with --chat-template-file, and "
        "run takes a prompt that you have put into another form yourself, with --raw",
        1,
    ),
    ("-tb", "--threads-batch", "-td", "--threads-draft"): _idle(_THREADS, 1),
    ("-C", "--cpu-mask", "-Cr", "--cpu-range", "--prio", "--poll", "--numa"): _idle(f"{_THREADS}; see taskset", 1),
    ("-ub", "--ubatch-size"): _idle("there is one size of batches, --batch-size", 1),
    _FLASH_ATTN: _idle("attention is always the fused op here"),
    ("--mlock",): _idle(f"{_MAPPED}; the system keeps in memory what is used"),
    ("--no-mmap", "--mmap", "-dio", "--direct-io", "--no-host"): _idle(_MAPPED),
    ("-nkvo", "--no-kv-offload", "-kvo", "--kv-offload"): _idle("a cache lies where its attention runs"),
    ("--no-op-offload", "--op-offload", "--no-repack", "-nr"): _idle(_ONE_PLACE),
    ("--swa-full", "--kv-unified", "-kvu", "--cont-batching", "-cb"): _idle("caches have one form"),
    ("-dt", "--defrag-thold"): _idle("caches need no defragmenting", 1),
    ("--no-warmup", "--warmup", "--no-perf", "--perf", "--simple-io", "-co", "--color", "--show-timings"): _idle(_LOG),
    ("--log-disable", "--log-colors", "--log-prefix", "--log-timestamps", "--no-display-prompt"): _idle(_LOG),
    ("-lv", "--verbosity", "--log-verbosity", "--log-file"): _idle(_LOG, 1),
    ("--verbose-prompt",): _idle("`graphrt tokenize` prints a prompt's tokens, `graphrt run --json` those it has read"),
    ("-e", "--escape"): _idle("a prompt is taken as it stands; write a newline in your shell as $'\\n'"),
    ("--no-escape",): _idle("a prompt is taken as it stands"),
    ("--check-tensors",): _idle("`graphrt trace --first-nan` finds what is no number"),
    ("-sm", "--split-mode", "-mg", "--main-gpu", "-ts", "--tensor-split"): _instead(
        "a model runs on one device, --backend triton:1 is the second GPU", 1
    ),
    ("-ot", "--override-tensor", "-ncmoe", "--n-cpu-moe"): _instead(_ONE_PLACE, 1),
    ("-cmoe", "--cpu-moe"): _instead(_ONE_PLACE),
    ("--override-kv",): _instead("keys can't be changed but for the rotation's, by --rope-scaling and the like", 1),
    ("--lora", "--lora-scaled"): _instead("run, chat and serve apply adapters; merge one into the model for others", 1),
    ("--control-vector",): _instead("control vectors can't be applied", 1),
    ("-md", "--model-draft", "-hfd", "--spec-type"): _instead(
        "a second model drafts tokens for graphrt serve alone", 1
    ),
    ("-np", "--parallel"): _instead("`graphrt run -np N` gives several texts of one prompt", 1),
    ("-mu", "--model-url"): _instead("fetch the file yourself and give its path, or give hf:OWNER/REPO[:QUANT]", 1),
    ("-hff", "--hf-file"): _instead("give hf:OWNER/REPO/FILE as the model", 1),
    ("-mm", "--mmproj", "--image", "--audio"): _instead("models read text alone", 1),
    ("--list-devices",): _instead("`graphrt devices` lists them"),
    # of llama-server
    ("--metrics", "--slots", "--props", "--no-slots"): _idle("`graphrt serve` has these routes, which tell no texts"),
    ("--embedding", "--embeddings"): _idle("`graphrt serve` gives vectors beside texts; --pooling says how"),
    ("--no-webui", "--no-ui", "--offline"): _idle("the page is one file, and nothing is fetched for it"),
    ("-nocb", "--no-cont-batching"): _idle("requests are always made in batches; -np 1 makes one at a time"),
    ("--threads-http", "-tbd", "--threads-batch-draft", "--prio-batch", "--poll-batch"): _idle(_THREADS, 1),
    ("--cache-prompt", "--no-cache-prompt"): _idle(
        "what prompts have in common is read once; --deterministic reads all"
    ),
    ("--cache-reuse", "--cache-ram", "-cram"): _idle("what prompts begin with is kept while pages are free", 1),
    ("--no-context-shift",): _idle("a text ends where its context is full"),
    ("--context-shift", "--keep"): _instead("a text ends where its context is full; -c N makes it larger"),
    ("--draft-min", "--draft-n-min", "--draft-p-min", "--spec-draft-n-min", "--spec-draft-p-min"): _idle(
        "guesses are left out where they cost more than they give", 1
    ),
    ("--draft-n-max", "--spec-draft-n-max"): Foreign("", 1, ours="--draft-max"),
    ("-v", "--verbose", "--log-verbose"): _idle(_LOG),
    ("--reasoning-format",): _instead("a request says reasoning_format", 1),
    ("--reasoning-budget", "-rea", "--reasoning"): _instead(
        """--chat-template-kwargs '{"enable_thinking": false}' is for templates that read it""", 1
    ),
    ("--default-chat-template-kwargs",): Foreign("", 1, ours="--chat-template-kwargs"),
    ("--rerank", "--reranking"): _idle("what a model is for its file says; `graphrt serve` has /rerank for all"),
    ("-bs", "--backend-sampling"): _idle("tokens are chosen on a GPU wherever it can do what is asked"),
    ("--sleep-idle-seconds",): _idle("a model stays in memory until the server ends", 1),
    ("--cache-idle-slots", "--no-cache-idle-slots"): _idle("what prompts begin with is kept while pages are free"),
    ("-sps", "--slot-prompt-similarity", "-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"): _idle(
        "what prompts have in common is found whatever slot it is in", 1
    ),
    ("--media-path",): _instead("models read text alone", 1),
    ("--slot-save-path",): _instead("--prompt-cache FILE keeps what prompts begin with", 1),
    ("--ssl-key-file", "--ssl-cert-file", "--api-prefix", "--path"): _instead("a proxy in front has that", 1),
    ("--host", "--port"): _instead("`graphrt serve` is the server, and has it", 1),
    ("--embd-normalize",): _instead("vectors have length 1 unless --no-normalize is given", 1),
    ("--embd-output-format",): _instead("--json gives one JSON object, -o F.npy an array", 1),
    ("--process-output",): _instead("`graphrt imatrix --process-output` has it"),
    ("--leave-output-tensor",): _instead("--output-tensor-type F16 keeps the output's weights"),
    ("--tensor-type", "--tensor-type-file"): _instead("types of tensors follow from TYPE, all alike with --pure", 1),
    ("--keep-split",): _instead("quantize writes one file; `graphrt split` cuts it"),
    ("--split-max-size",): Foreign("", 1, ours="--max-size"),
    ("--split-max-tensors",): Foreign("", 1, ours="--max-tensors"),
    ("--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale"): _instead(_ROPE, 1),
    ("--yarn-orig-ctx", "--yarn-ext-factor", "--yarn-attn-factor"): _instead(_ROPE, 1),
    ("--yarn-beta-fast", "--yarn-beta-slow"): _instead(_ROPE, 1),
}
FOREIGN = {name: row for names, row in _ROWS.items() for name in names}
MODEL = ("-m", "--model")


def adapted(argv: Sequence[str], has_flag: Callable[[str], bool], has_model: bool) -> tuple[list[str], list[str]]:
    """The arguments with llama.cpp's flags replaced or left out, and sentences to print. has_flag: whether the verb has
    a flag of its own of that name; has_model: whether its first argument is a model. Raises SessionError for flags
    without which the verb would do something else than was asked."""
    model: list[str] = []
    out: list[str] = []
    notes: list[str] = []
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.partition("=")
        if arg == "--":
            out += [arg, *rest]
            break
        if name in _FLASH_ATTN and has_flag(name):
            out += [name, value if equals else rest.pop(0) if rest and rest[0] in SWITCH else "on"]
        elif not name.startswith("-") or has_flag(name):
            out.append(arg)
        elif name in MODEL and has_model:
            model += [value] if equals else _values(name, rest, 1)
        elif name in FOREIGN:
            row = FOREIGN[name]
            values = [value] if equals else _values(name, rest, row.takes)
            if name in _FLASH_ATTN and not equals and rest and rest[0] in SWITCH:
                values = [rest.pop(0)]
            said = _place(name, row, values, has_flag, out, model)
            notes += [f"{name} {said}"] if said else []
        else:
            out.append(arg)
    return [*model, *out], notes


def _values(name: str, rest: list[str], n: int) -> list[str]:
    if len(rest) < n:
        raise SessionError(f"{name} needs a value after it, got none; give one")
    return [rest.pop(0) for _ in range(n)]


def _place(
    name: str, row: Foreign, values: list[str], has_flag: Callable[[str], bool], out: list[str], model: list[str]
) -> str:
    """Puts ours into its place; the sentence to print. Raises SessionError for a flag that is refused."""
    if row.refused:
        raise SessionError(f"{name} {row.says}")
    if row.ours == "hf:":
        model.append(values[0] if values[0].startswith("hf:") else f"hf:{values[0]}")
    elif row.ours == "--backend":  # of -ngl
        if values[0] != "0":
            return f"changes nothing here: {_ONE_PLACE}"
        if not has_flag("--backend"):
            raise SessionError(f"{name} is not here: this verb names its backends itself; see its --help")
        out += ["--backend", "cpu"]
    elif row.ours:
        if not has_flag(row.ours):
            raise SessionError(f"{name} is not here: the verb has no {row.ours}, which it stands for; see its --help")
        out += [row.ours, *values]
    return row.says
