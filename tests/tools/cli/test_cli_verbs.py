"""The other verbs on tiny models, help, and streams that do not work."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support import gguf_files
from support.command_line import GREEDY, Cli, Result, command, environment, tokenizer
from support.tiny import IM_END

from graphrt.models import hub, load
from graphrt.models.engine import SessionOptions
from graphrt.models.model import nll
from graphrt.tools import cli, needle


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


def test_needles_are_made_of_numbers_alone(graphrt: Cli, models: Path) -> None:
    """The same contexts each time, as long as was asked for, with the needle at its depth and its code as the answer;
    the loss is that of the logits of the whole context."""
    model, n_ctx = load(models / "spm.gguf", "cpu"), 900
    trials = [needle.make_trial(model.tokenizer, n_ctx, depth, 1) for depth in (0.0, 0.5, 1.0)]
    assert trials == [needle.make_trial(model.tokenizer, n_ctx, depth, 1) for depth in (0.0, 0.5, 1.0)]
    places = []
    for trial in trials:
        text = model.tokenizer.decode(trial.ids)
        name, code = re.findall(r"code of (\w+) is ((?:\d ?){5})$", text)[0]
        answer = model.tokenizer.decode(trial.ids[-trial.n_answer :])
        assert n_ctx - 100 < len(trial.ids) <= n_ctx and answer.strip() == code
        assert text.count(code) == 2 and text.count("The pass code of") > 2
        places.append(text.index(f"The pass code of {name} is {code}.") / text.index("Question:"))
    assert places[0] < 0.02 and 0.3 < places[1] < 0.7 and places[2] > 0.9
    argv = ("perplexity", "spm.gguf", "--needle", "2", "-c", str(n_ctx), "--json", "-ctk", "f8", "-ctv", "f8")
    found = graphrt(*argv).json()
    session = model.session(SessionOptions(n_ctx, type_k="f8", type_v="f8"))
    losses = []
    for i, depth in enumerate((0.0, 1.0)):
        trial = needle.make_trial(model.tokenizer, n_ctx, depth, i)
        session.reset()
        rows = session.eval_rows(trial.ids)[-trial.n_answer - 1 : -1]
        losses.append(float(nll(rows, trial.ids[-trial.n_answer :]).mean()))
    assert found["needles"] == 2 and [d["loss"] for d in found["depths"]] == pytest.approx(losses, rel=1e-2)
    assert found["loss"] == pytest.approx(sum(losses) / 2, rel=1e-2)


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
