"""The flags of sampling and of texts: the same names and defaults as generate()'s keywords; what they do and refuse."""

from __future__ import annotations

import argparse
import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny import write_model
from support.verbs import Result

from graphrt.models import Model, SamplerParams, load
from graphrt.tools import cli
from graphrt.tools.sampling import flags
from graphrt.tools.verbs import run

Cli = Callable[..., Result]
#: generate()'s keywords that are no flags of run, or have another form there: -p and -n, --raw, and llama.cpp has no
#: flag for min_keep.
NO_FLAGS = {"self", "prompt", "n", "sampling", "raw", "session", "min_keep"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("flags")
    return write_model(folder / "spm.gguf", "llama", tokenizer="spm")


@pytest.fixture
def graphrt(path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """`run` of the model with this prompt, and what it printed."""

    def run_it(*argv: str) -> Result:
        capsys.readouterr()
        try:
            code = cli.main(["run", str(path), "--backend", "cpu", "-p", "hello the sea", "--raw", *argv])
        except SystemExit as left:
            code = int(left.code or 0)
        return Result(code, *capsys.readouterr())

    return run_it


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return parser.parse_args(argv)


def test_flags_are_generates_keywords() -> None:
    """In names and in defaults; each has its keyword's name for a long one."""
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    keywords = {name: p.default for name, p in inspect.signature(Model.generate).parameters.items()}
    defaults = parser.parse_args([])
    given = vars(flags.sampler_params(defaults)) | flags.text_options(defaults) | flags.output_options(defaults)
    assert set(keywords) - set(given) == NO_FLAGS - {"min_keep"} and set(given) <= set(keywords)
    for name in set(given) - NO_FLAGS:
        assert f"--{name.replace('_', '-')}" in parser._option_string_actions, name
        action = parser._option_string_actions[f"--{name.replace('_', '-')}"]
        assert action.dest == name
        wanted = list(keywords[name]) if isinstance(given[name], (list, tuple)) else keywords[name]
        assert (list(given[name]) if isinstance(given[name], (list, tuple)) else given[name]) == wanted, name
    assert flags.sampler_params(defaults) == SamplerParams()


def test_values_arrive() -> None:
    args = parsed(
        "--dry-multiplier", "0.8", "--dry-sequence-breaker", r"\n", "--dry-sequence-breaker", "x", "--mirostat", "2",
        "--mirostat-ent", "3", "--mirostat-lr", "0.2", "--dynatemp-range", "0.5", "--dynatemp-exp", "2",
        "--top-nsigma", "1.5", "--typical", "0.9", "-l", "15+1.5", "--logit-bias", "7-inf", "-l", "8-.5e1",
    )  # fmt: skip
    assert flags.sampler_params(args) == SamplerParams(
        dry_multiplier=0.8, dry_sequence_breaker=["\n", "x"], mirostat=2, mirostat_ent=3, mirostat_lr=0.2,
        dynatemp_range=0.5, dynatemp_exp=2, top_n_sigma=1.5, typical_p=0.9,
        logit_bias={15: 1.5, 7: -math.inf, 8: -5.0},
    )  # fmt: skip
    assert flags.sampler_params(parsed("--dry-sequence-breaker", "none")).dry_sequence_breaker == ()


def test_escapes_of_stops() -> None:
    args = parsed("-r", r"a\nb", "--stop", r"\x41\t\"\\n", "--reverse-prompt", r"\q", "--stop-ids", "5")
    assert args.stop == ["a\nb", 'A\t"\\n', r"\q"] and args.stop_ids == [5]


def test_a_stop_text(graphrt: Cli) -> None:
    free = graphrt("--temp", "0", "-n", "30", "--ignore-eos", "--json").json()
    assert free["finish"] == "length" and "logprobs" not in free
    stop = free["text"][8:12]
    found = graphrt("--temp", "0", "-n", "30", "--ignore-eos", "--json", "-r", stop).json()
    assert found["finish"] == "stop" and found["text"] == free["text"][: free["text"].index(stop)]
    shown = graphrt("--temp", "0", "-n", "30", "--ignore-eos", "--stop", stop)
    assert shown.out.removesuffix("\n") == found["text"].removesuffix("\n") or shown.out == found["text"]
    dashed = graphrt("--temp", "0", "-n", "3", "--ignore-eos", "--stop", "-x", "--json")
    assert dashed.code == 0, "a text may start with a dash"


def test_logprobs(graphrt: Cli, path: Path) -> None:
    found = graphrt("--temp", "1.5", "--seed", "4", "-n", "5", "--ignore-eos", "--json", "--logprobs", "2").json()
    pieces = list(load(path, "cpu").generate(found["prompt_tokens"], 5, temp=1.5, seed=4, ignore_eos=True, logprobs=2))
    assert found["tokens"] == [p.token for p in pieces] == [told["id"] for told in found["logprobs"]]
    for told, piece in zip(found["logprobs"], pieces):
        assert piece.logprobs is not None
        assert told["logprob"] == pytest.approx(piece.logprobs.token, abs=1e-3)
        assert [best["id"] for best in told["top_logprobs"]] == [token for token, _ in piece.logprobs.best]
        assert bytes(told["bytes"]).decode("utf-8", "replace") == told["token"]
    assert "give --json too" in graphrt("--logprobs", "2").err


def test_several_texts(graphrt: Cli) -> None:
    given = ("--temp", "1.5", "-n", "6", "--ignore-eos")
    found = graphrt(*given, "-np", "3", "--seed", "5", "--json").json()
    for i, sample in enumerate(found["samples"]):
        alone = graphrt(*given, "--seed", str(5 + i), "--json").json()
        assert (sample["tokens"], sample["text"], sample["finish"]) == (alone["tokens"], alone["text"], "length")
    shown = graphrt(*given, "-np", "3", "--seed", "5")
    texts = "".join(f"--- text {i} of 3\n{sample['text']}\n" for i, sample in enumerate(found["samples"]))
    assert shown.out == texts and "generated 18 tokens in 3 texts" in shown.err
    assert "--profile measures a text in one ring" in graphrt("-np", "2", "--profile", "x.json").err


@pytest.mark.parametrize("form", ["--grammar", "--grammar-file"])
def test_a_grammar(graphrt: Cli, tmp_path: Path, form: str) -> None:
    pytest.importorskip("llguidance")
    grammar = 'root ::= "-" [a-c]{4}'
    (tmp_path / "g.gbnf").write_text(grammar)
    value = grammar if form == "--grammar" else str(tmp_path / "g.gbnf")
    found = graphrt("--seed", "1", "--json", form, value).json()
    assert found["finish"] == "eog" and len(found["text"]) == 5 and set(found["text"][1:]) <= set("abc")


@pytest.mark.parametrize("form", ["-j", "-jf"])
def test_a_json_schema(graphrt: Cli, tmp_path: Path, form: str) -> None:
    pytest.importorskip("llguidance")
    schema = json.dumps({"type": "array", "items": {"enum": [1, True, "x"]}, "minItems": 2, "maxItems": 2})
    (tmp_path / "s.json").write_text(schema)
    found = graphrt("--seed", "1", "--json", form, schema if form == "-j" else str(tmp_path / "s.json")).json()
    assert found["finish"] == "eog" and set(map(str, json.loads(found["text"]))) <= {"1", "True", "x"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("-l", "5"), "must be as 15043+1, 15043-1.5 or 15043-inf, got '5'"),
        (("-l", "5+inf"), "must be as 15043+1"),
        (("-l", "99999+1"), "logit_bias must name token ids, 0 to 328, got 99999"),
        (("--mirostat", "3"), "mirostat must be from 0 to 2, got 3"),
        (("--dry-sequence-breaker", ""), "texts of 1 to 40 characters, got ''"),
        (("--stop", ""), "a stop must be a text of at least one character"),
        (("--stop-ids", "999"), "a stop id must be a token id, 0 to 328, got 999"),
        (("--stop-ids", "-1"), "must be at least 0, got -1"),
        (("-np", "0"), "must be from 1 to 256, got 0"),
        (("--logprobs", "5000", "--json"), "logprobs must be how many of the likeliest tokens are named, 0 to 1024"),
        (("--grammar", "root"), "a rule must be written as NAME ::= ..., got root without ::="),
        (("--grammar", "x", "-j", "{}"), "not allowed with argument"),
        (("--grammar-file", "/nowhere/g.gbnf"), "a text must be readable"),
        (("-j", "{"), "a JSON schema must be JSON"),
        (("-j", "{}", "--ignore-eos"), "give one of grammar, json_schema, regex and ignore_eos"),
    ],
)
def test_what_is_refused(graphrt: Cli, argv: tuple[str, ...], message: str) -> None:
    result: Any = graphrt(*argv)
    assert result.code == 2 and message in result.err and result.out == ""
