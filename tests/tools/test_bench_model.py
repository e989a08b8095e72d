"""`graphrt bench MODEL` and the models it makes up: their sizes and numbers, right results reported, wrong ones not."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.tiny import write_model

from graphrt import backend as backends
from graphrt.backend import Buffer, Group, Place, get_backend
from graphrt.backends.cpu import CpuBackend
from graphrt.dtypes import dtype
from graphrt.errors import GGUFError, SessionError, TokenizerError
from graphrt.models.embed import Embedder
from graphrt.models.engine import SessionOptions
from graphrt.models.gguf import GGUFFile
from graphrt.models.model import Model
from graphrt.models.synthetic import MIXES, RECIPES, more_bits, synthetic
from graphrt.models.synthetic_blocks import TYPES, cut, places, pool
from graphrt.program import Program
from graphrt.testing import nmse
from graphrt.tools import cli
from graphrt.tools.bench import machine as bench_model_machine
from graphrt.tools.bench import model_check as bench_model_check
from graphrt.tools.bench.encoder import DenseEmbedder
from graphrt.tools.bench.model import Prepared, add_work
from graphrt.tools.bench.model_check import median_nmse
from graphrt.tools.bench.workload import Batch
from graphrt.tools.bench.workload import Test as Timed
from graphrt.tools.verbs import bench as bench_verb

Bench = Callable[..., tuple[int, str, str]]
GIB = 2**30
IDS = [int(i) for i in np.random.default_rng(3).integers(0, 512, 64)]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs `graphrt bench ...` on the CPU in this process: exit code, stdout, stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        chosen = () if "--backend" in argv else ("--backend", "cpu")
        try:
            code = cli.main(["bench", *argv, *chosen])
        except SystemExit as left:
            code = int(left.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def a_model(name: str, layers: int | None = None) -> Model:
    return Model(synthetic(name, layers), [get_backend("cpu", exact=False)])


# ---- made up models ----


@pytest.mark.parametrize(
    ("name", "nbytes", "types"),
    [
        ("llama-8b:q4_k_m", 4.575 * GIB, {"q4_K": 193, "q6_K": 33, "f32": 66}),
        ("llama-8b", 4.575 * GIB, {"q4_K": 193, "q6_K": 33, "f32": 66}),
        ("llama-1b:q4_k_m", 904 * 2**20, {"q4_K": 97, "q6_K": 17, "f32": 34}),
        # these two as the files that people use: what `graphrt info` says of them
        ("smollm2-135m:q4_1", 92.1 * 2**20, {"q4_1": 210, "q8_0": 1, "f32": 61}),
        ("gemma3-270m:q4_k_m", 235.2 * 2**20, {"q8_0": 10, "q5_0": 81, "q4_K": 27, "q6_K": 9, "f32": 109}),
        ("llama-8b:f16", 14.958 * GIB, {"f16": 226, "f32": 66}),
        ("llama-8b:q8_0", 7.947 * GIB, {"q8_0": 226, "f32": 66}),
        ("llama-8b:q4_0", 4.334 * GIB, {"q4_0": 225, "q6_K": 1, "f32": 66}),
        ("gpt-oss-20b", 11.27 * GIB, {"q8_0": 98, "mxfp4": 72, "f32": 289}),
    ],
)
def test_shapes_and_types_are_those_of_real_files(name: str, nbytes: float, types: dict[str, int]) -> None:
    file = synthetic(name)
    found = [info.dtype.name for info in file.tensors.values()]
    assert {kind: found.count(kind) for kind in found} == types
    assert file.nbytes == sum(info.nbytes for info in file.tensors.values()) == pytest.approx(nbytes, rel=1e-3)


def test_half_of_the_layers_get_more_bits() -> None:
    assert [il for il in range(32) if more_bits(il, 32)] == [*range(4), *range(6, 28, 3), *range(28, 32)]


@pytest.mark.parametrize("mix", MIXES)
def test_values_have_a_known_spread_and_no_mean(mix: str) -> None:
    file = synthetic(f"tiny:{mix}")
    matrices = [name for name, info in file.tensors.items() if len(info.ne) == 2]
    for name in matrices:
        values = file.dequantize(name).astype(np.float64)
        k = values.shape[-1]
        assert values.std() == pytest.approx(k**-0.5, rel=0.05) and abs(values.mean()) < 0.02 * values.std()
        assert np.abs(values.mean(-1)).max() < 0.5 * k**-0.5, "no row may lean to one side"
    assert {file.tensors[n].dtype.name for n in matrices} <= set(TYPES)
    norm = file.dequantize("output_norm.weight")
    assert 0.8 <= norm.min() < norm.max() <= 1.2


def test_the_same_name_gives_the_same_bytes_and_another_tensor_others() -> None:
    first, again = synthetic("tiny"), synthetic("tiny")
    for name in first.tensors:
        assert np.array_equal(first.data(name), again.data(name)) and first.data(name) is not first.data(name)
    assert not np.array_equal(first.data("blk.0.attn_q.weight"), first.data("blk.1.attn_q.weight"))


@pytest.mark.parametrize("kind", TYPES)
def test_a_large_tensor_is_cut_from_the_pool_in_whole_blocks(kind: str) -> None:
    blocks = pool(dtype(kind), 0.1, np.random.default_rng(0))
    known = {block.tobytes() for block in blocks}
    size = dtype(kind).type_size
    nbytes = (3 * len(blocks) + 7) * size
    data = cut(blocks, 0, nbytes, places(blocks, nbytes, np.random.default_rng(1)))
    assert all(block.tobytes() in known for block in data.reshape(-1, size)[:: len(blocks) // 500])


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("mix", MIXES)
def test_a_model_gives_logits_of_about_one(mix: str, exact: bool) -> None:
    model = Model(synthetic(f"tiny:{mix}"), [get_backend("cpu", exact=exact)])
    logits = model.logits(IDS)
    assert logits.shape == (64, 512) and np.isfinite(logits).all() and 0.5 < logits.std() < 2
    assert np.abs(np.corrcoef(logits) - np.eye(64)).max() < 0.999, "tokens must make a difference"


def test_depth_does_no_harm_to_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = replace(RECIPES["tiny"], keys={**RECIPES["tiny"].keys, "block_count": 48})
    monkeypatch.setitem(RECIPES, "deep", deep)
    logits = a_model("deep:q4_0").logits(IDS[:16])
    assert np.isfinite(logits).all() and 0.5 < logits.std() < 2


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a small gemma3 with a window of 12."""
    gemma = RECIPES["gemma3-270m"]
    small = {"vocab_size": 512, "embedding_length": 160, "block_count": 7, "feed_forward_length": 256}
    keys = {**gemma.keys, **small, "attention.sliding_window": 12, "attention.key_length": 32}
    keys |= {"attention.value_length": 32, "rope.dimension_count": 32}
    monkeypatch.setitem(RECIPES, "small-gemma3", replace(gemma, keys=keys))
    return "small-gemma3"


def test_a_gemma3(windows: str) -> None:
    file = synthetic(windows)
    assert "output.weight" not in file.tensors and file.tensors["token_embd.weight"].dtype.name == "q8_0"
    assert file.tensors["blk.0.attn_q.weight"].dtype.name == "q5_0", "rows of 160 hold no block of 256"
    logits = a_model(windows).logits(IDS)
    assert np.isfinite(logits).all() and 0.5 < logits.std() < 2


def test_cut_down_to_some_layers() -> None:
    assert synthetic("llama-8b", 2).nbytes < 0.3 * synthetic("llama-8b").nbytes
    model = a_model("tiny", 2)
    assert len(model.decoder.layers) == 2 and np.isfinite(model.logits(IDS[:4])).all()


def test_what_a_made_up_model_has_not() -> None:
    model = a_model("tiny")
    with pytest.raises(TokenizerError, match="no vocabulary.*\n.*token ids instead"):
        next(model.generate("hello"))
    with pytest.raises(GGUFError, match="synthetic tiny:q4_k_m: there is no tensor"):
        synthetic("tiny").data("output.weights")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama-9b:q4_0", "one of llama-8b, llama-1b, .*did you mean llama-"),
        ("", "a synthetic model must be one of"),
        ("tiny:q4_k_n", "a quantization of tiny must be one of q4_k_m, .*did you mean q4_k_m"),
        ("tiny:q4_0:x", "got 'q4_0:x'"),
    ],
)
def test_bad_names(name: str, said: str) -> None:
    with pytest.raises(SessionError, match=said):
        synthetic(name)


# ---- what is measured ----


def test_names_and_positions() -> None:
    tests = {str(t): (t.start, t.end) for t in (Timed("pp", 8), Timed("pp", 8, 4), Timed("tg", 8), Timed("tg", 8, 4))}
    assert tests == {"pp8": (0, 8), "pp8 @ d4": (4, 12), "tg8": (1, 9), "tg8 @ d4": (4, 12)}
    assert Timed("pp", 4096).steps(512) == 8 and Timed("tg", 128).steps(512) == 128


@pytest.mark.parametrize("name", ["tiny", "windows"])
@pytest.mark.parametrize("kind", ["pp", "tg"])
def test_each_repetition_starts_from_the_same_depth(request: pytest.FixtureRequest, name: str, kind: str) -> None:
    model = a_model(request.getfixturevalue(name) if name == "windows" else name)
    options = SessionOptions(64, 16, "f32", "f32")
    test = Timed(kind, 6, 20)
    want = model.session(options)
    want.eval(IDS[:20])
    read = list(IDS[20:26])
    if kind == "tg":  # each the likeliest after the one before
        read[1:] = list(want.likeliest(read[0], 5))
        want.rewind(20)
    expected = want.eval([*read, IDS[26]]).copy()
    prepared = Prepared(model, test, options, IDS)
    for _ in range(3):
        assert prepared.once() > 0 and prepared.engine.lengths.tolist() == [26]
        got = prepared.engine.read({0: IDS[26:27]})[0]
        assert nmse(got, expected) < 1e-8  # last bits that differ by batch move some activations by a step of 16 bits


def test_lengths_of_sequences(tmp_path: Path) -> None:
    """The same in each run, around their mean; from a file as they stand there."""
    (tmp_path / "lengths").write_text("5, 7\n100\n")
    assert Batch.of(str(tmp_path / "lengths")).lengths == (5, 7, 100) and Batch.of("16") == Batch(16)
    for name in ("uniform", "ragged"):
        batch = Batch.of(f"{name}:400:100")
        assert batch == Batch.of(f"{name}:400:100") and batch.n == 400
        assert 80 < np.mean(batch.lengths) < 120 and min(batch.lengths) >= 1 and max(batch.lengths) > 180
    lengths = Batch.of("between:300:40:20").lengths
    assert min(lengths) == 20 and max(lengths) == 40 and 29 < np.mean(lengths) < 31
    assert str(Timed("tg", 3, 4, Batch(2, (5, 7), "ragged"))) == "tg3 x 2 ragged 6 @ d4"
    test = Timed("tg", 3, 4, Batch(2, (5, 7)))
    assert (test.starts, test.ends, test.n_timed) == ([9, 11], [12, 14], 6)
    test = Timed("pp", 0, 4, Batch(2, (5, 7), "f"))
    assert (test.starts, test.ends, test.n_timed, str(test)) == ([4, 4], [9, 11], 12, "pp x 2 f 6 @ d4")
    (tmp_path / "wrong").write_text("5 x")
    for text, message in (
        ("ragged:4", "given as ragged:SEQUENCES:MEAN, got 'ragged:4'"),
        ("ragged:0:5", "1 to 65536 sequences of 1 to 1000000 tokens, got 0"),
        (str(tmp_path / "wrong"), "or a file of whole numbers"),
        ("between:4:5", "given as between:SEQUENCES:LOW:HIGH, got 'between:4:5'"),
        ("nowhere", "a number, one of uniform:N:MEAN, ragged:N:MEAN, between:N:LOW:HIGH, or a file"),
    ):
        with pytest.raises(SessionError, match=message):
            Batch.of(text)


@pytest.mark.parametrize("name", ["tiny", "windows"])
@pytest.mark.parametrize("kind", ["pp", "tg"])
def test_sequences_of_different_lengths_are_put_back(request: pytest.FixtureRequest, name: str, kind: str) -> None:
    model = a_model(request.getfixturevalue(name) if name == "windows" else name)
    test = Timed(kind, 0 if kind == "pp" else 6, 0, Batch(3, (20, 3, 33)))
    prepared = Prepared(model, test, SessionOptions(64, 16, "f32", "f32"), IDS)
    for _ in range(2):
        assert prepared.once() > 0 and prepared.engine.lengths.tolist() == test.ends
    row: dict[str, Any] = {"tokens_per_s": 1e9}
    add_work(row, model, prepared)
    assert row.get("kv_bytes_per_token", 1) > 0


def test_bytes_and_operations_of_a_token(windows: str) -> None:
    model = a_model(windows)
    hp, options = model.decoder.hp, SessionOptions(64, 16, "f16", "q8_0")
    cells = 32 * hp.n_head_kv[0]  # elements of k, and of v
    row: dict[str, Any] = {"tokens_per_s": 1e9}
    add_work(row, model, Prepared(model, Timed("tg", 3, 20), options, IDS))
    per_cell = 2 * cells + cells // 32 * 34
    assert row["kv_bytes_per_token"] == per_cell * (6 * 12 + 22), "six layers see their window, one sees 21 to 23"
    assert row["gb_per_s"] == row["bytes_per_token"] == model.weights.nbytes + row["kv_bytes_per_token"]
    row = {"tokens_per_s": 1e9}
    add_work(row, model, Prepared(model, Timed("pp", 3, 20), options, IDS))
    heads = hp.n_head[0] * 32
    matrices = 160 * heads + 2 * 160 * cells + heads * 160 + 3 * 160 * 256
    assert row["gflop_per_s"] == 7 * 2 * matrices + 4 * heads * (6 * 12 + 22)


def test_rows_as_json(bench: Bench) -> None:
    code, out, err = bench("--synthetic", "tiny:q4_k_m", "-p", "8", "-n", "4", "-d", "0,16", "-r", "2", "--json")
    assert code == 0 and err.count("t/s\n") == 4
    report = json.loads(out)
    assert [r["test"] for r in report["results"]] == ["pp8", "tg4", "pp8 @ d16", "tg4 @ d16"]
    assert report["model"] == "tiny:q4_k_m" and report["backend"] == "cpu" and report["peer"] is None
    assert report["machine"].keys() == {"cpu", "threads", "torch", "read_gb_per_s", "f32_gflop_per_s"}
    assert report["error_nmse"] < report["checked"]["limit"] == 1e-6 and "prompt of 40" in report["checked"]["what"]
    for row in report["results"]:
        assert row["tokens_per_s"] > 0 and row["deviation"] >= 0 and row["share"] > 0
        assert ("gb_per_s" in row) == (row["kind"] == "tg") != ("gflop_per_s" in row)


def test_a_table_a_file_and_cache_types(bench: Bench, tmp_path: Path) -> None:
    path = str(write_model(tmp_path / "m.gguf", "llama"))
    code, out, _ = bench(path, "-p", "8", "-n", "0", "-d", "16", "-r", "1", "--md", "-ctk", "bf16", "-ctv", "f32")
    head, _, row, *_ = [[cell.strip() for cell in line.strip("| ").split("|")] for line in out.splitlines()]
    assert code == 0 and head == [
        "model",
        "size",
        "params",
        "backend",
        "threads",
        "test",
        "t/s",
        "+-",
        "rate",
        "of ceiling",
    ]
    with GGUFFile.open(path) as file:
        n, size = (sum(f(t) for t in file.tensors.values()) for f in (lambda t: math.prod(t.ne), lambda t: t.nbytes))
    cells = dict(zip(head, row, strict=True))
    assert cells["params"] == f"{n / 1e6:.2f} M" and cells["size"] == f"{size / 1024:.1f} KiB" and all(row), (
        "none empty"
    )
    assert (cells["backend"], cells["threads"], cells["test"]) == ("cpu", str(torch.get_num_threads()), "pp8 @ d16")
    assert "logits within NMSE" in out
    code, out, _ = bench(path, "-p", "0", "-n", "2", "-r", "1", "--exact")
    assert code == 0 and " tg2 " in out and "the reference itself" in out


def test_a_context_of_the_length_that_a_test_needs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    engine = Model.engine
    monkeypatch.setattr(Model, "engine", lambda self, n, o: (seen.append(o.n_ctx), engine(self, n, o))[1])
    assert bench("--synthetic", "tiny", "-p", "8", "-n", "4", "-d", "0,505", "-r", "1")[0] == 2, "513 tokens of 512"
    assert seen == []
    assert bench("--synthetic", "tiny", "-p", "8", "-n", "4", "-d", "0,500", "-r", "1")[0] == 0
    assert seen[-4:] == [72, 69, 512, 512]


# ---- wrong results ----


class Wrong(CpuBackend):
    """Reads the first block of each weight wrong."""

    name: ClassVar[str] = "wrong"

    def wrap_host(self, data: np.ndarray) -> Any:
        if data.size > 1024 and data.size % 4 == 0:
            data = data.copy()
            data[:4] ^= 0x3F
        return super().wrap_host(data)


class Rounding(Wrong):
    """As wrong, but it says so."""

    name: ClassVar[str] = "rounding"
    logits_nmse = 10.0


class NaNs(CpuBackend):
    name: ClassVar[str] = "nans"

    def compile(self, groups: list[Group], place: Callable[[Any], Place]) -> Program:
        run = super().compile(groups, place)
        out: tuple[Buffer, int] = place(groups[-1].nodes[-1])

        def spoilt() -> None:
            run()
            out[0].write(out[1], np.full(4, 0xFF, np.uint8))

        return Program(groups, spoilt)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (Wrong, Rounding, NaNs):
        monkeypatch.setitem(backends._REGISTERED, cls.name, cls)


def test_of_a_mixture_most_rows_must_be_right() -> None:
    """A row or two whose token chose other experts say nothing; a prompt that is wrong does, and so do steps."""
    theirs = np.random.default_rng(0).standard_normal((7, 50))

    def error(*wrong: int) -> float:
        ours = theirs + 1e-5
        ours[list(wrong)] += 0.3
        return median_nmse(ours, theirs, 3)

    assert all(error(*wrong) < 1e-9 for wrong in ((), (1,), (5,), (0, 4)))
    assert all(error(*wrong) > 1e-3 for wrong in ((0, 1, 2, 3), (0, 1), (4, 5, 6), (4, 6)))


TINY = ("--synthetic", "tiny", "-p", "8", "-n", "2", "-r", "1")


@pytest.mark.parametrize("name", ["wrong", "nans"])
@pytest.mark.usefixtures("broken")
def test_wrong_logits_are_not_reported(bench: Bench, name: str) -> None:
    code, out, err = bench(*TINY, "--backend", name)
    assert (code, out) == (1, "")
    assert err.startswith("not measured: logits differ from the reference by NMSE ") and "graphrt test" in err


@pytest.mark.usefixtures("broken")
def test_a_backend_says_how_exact_it_is(bench: Bench) -> None:
    code, out, _ = bench(*TINY, "--backend", "rounding", "--json", "-ctk", "q8_0")
    checked = json.loads(out)["checked"]
    assert code == 0 and checked["limit"] == pytest.approx(10.0 + 1e-4 + 1e-7, rel=1e-9)
    assert "q8_0 keys and f16 values" in checked["what"] and "prompt of 40" in checked["what"]


def test_on_a_gpu_a_whole_batch_is_compared(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut to what the model's context holds."""
    monkeypatch.setattr(bench_model_machine, "on_gpu", lambda backend: True)
    monkeypatch.setattr(bench_model_machine, "_gpu", lambda backend: bench_model_machine.cpu())
    what = json.loads(bench(*TINY, "--json")[1])["checked"]["what"]
    assert what.startswith("4 rows of a prompt of 509 tokens and 3 single steps")
    what = json.loads(bench(*TINY, "--json", "-b", "100")[1])["checked"]["what"]
    assert what.startswith("4 rows of a prompt of 100 tokens")


@pytest.mark.usefixtures("broken")
def test_of_a_large_model_a_part_is_compared(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_model_check, "WHOLE", 1000)
    code, out, _ = bench(*TINY, "--json")
    assert code == 0 and json.loads(out)["checked"]["what"].endswith("of the same recipe with 2 layers")
    assert bench(*TINY, "--backend", "wrong")[0] == 1
    path = str(write_model(tmp_path / "m.gguf", "llama"))
    code, out, _ = bench(path, "-p", "8", "-n", "2", "-r", "1", "--json")
    assert code == 0 and "4 rows of a prompt of 8 tokens and 1 single step," in json.loads(out)["checked"]["what"]


def test_a_whole_model_that_gives_no_numbers_is_not_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_model_check, "finite", lambda *_: False)
    code, out, err = bench(*TINY)
    assert (code, out) == (1, "") and "not finite" in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "one model must be given"),
        (("m.gguf", "--synthetic", "tiny"), "one model must be given"),
        (("--synthetic", "huge"), "a synthetic model must be one of"),
        (("--synthetic", "tiny", "-d", "x"), "whole numbers with commas between, got 'x'"),
        (("--synthetic", "tiny", "-d", "-1"), "must be from 0 on, whole numbers with commas between, got '-1'"),
        (("--synthetic", "tiny", "-p", "0", "-n", "0"), "there must be a test"),
        (("--synthetic", "tiny", "-r", "0"), "got 2 and -r 0"),
        (("--synthetic", "tiny", "-d", "1000"), "test pp512 @ d1000 needs a context of 1512 tokens, the model allows"),
        (("--synthetic", "tiny", "-c", "100"), "test pp512 needs a context of 512 tokens, -c gives 100; raise it"),
        (("--synthetic", "tiny", "-p", "8", "-n", "0", "-ctk", "q3_K"), "a cache's type_k must be one of"),
        (("--synthetic", "tiny", "--peer-python", sys.executable), "needs a file that it can read too"),
        (("none.gguf",), "there is no such file"),
    ],
)
def test_what_can_not_be_asked(bench: Bench, argv: tuple[str, ...], said: str) -> None:
    code, out, err = bench(*argv)
    assert (code, out) == (2, "") and said in err and err.count("\n") <= 3


def test_a_peer_that_is_none(bench: Bench, tmp_path: Path) -> None:
    path = str(write_model(tmp_path / "m.gguf", "llama"))
    one = (path, "-p", "8", "-n", "0", "-r", "1", "--peer-python")
    assert "can't be started" in bench(*one, str(tmp_path / "no-python"))[2]
    assert "its Python needs llama-cpp-python" in bench(*one, "/bin/true")[2]


FAKE_PEER = """#!/bin/sh
echo ready 1.2.3
while read -r kind first n ids; do echo 0.5; echo "$kind $first $n $ids" >> "$0.log"; done
"""


def test_a_peer_beside(bench: Bench, tmp_path: Path) -> None:
    path = str(write_model(tmp_path / "m.gguf", "llama"))
    python = tmp_path / "python"
    python.write_text(FAKE_PEER)
    python.chmod(0o755)
    argv = ("-p", "8", "-n", "4", "-d", "0,16", "-r", "2", "--peer-python", str(python))
    code, out, _ = bench(path, *argv, "--json")
    report = json.loads(out)
    assert code == 0 and report["peer"] == "1.2.3"
    assert [r["peer"]["tokens_per_s"] for r in report["results"]] == [16, 8, 16, 8]
    asked = [line.split() for line in Path(f"{python}.log").read_text().splitlines()]
    assert [a[:3] for a in asked[::3]] == [["pp", "0", "8"], ["tg", "1", "4"], ["pp", "16", "8"], ["tg", "16", "4"]]
    assert all(len(a[3].split(",")) == int(a[1]) + int(a[2]) for a in asked) and len(asked) == 12
    assert "peer: llama-cpp-python 1.2.3" in bench(path, *argv)[1]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2", 0.124),
        ("qwen2.5-7b", 7.62),
        ("qwen3-8b", 8.19),
        ("gemma2-2b", 2.61),
        ("phi3-mini", 3.82),
        ("mpt-7b", 6.65),
        ("gpt-oss-20b", 20.91),
        ("deepseek2-lite", 15.71),
        ("bge-small", 0.0332),  # without the pooler, which no file has
    ],
)
def test_recipes_have_as_many_parameters_as_the_models(name: str, billions: float) -> None:
    """As their makers count them."""
    parameters = sum(math.prod(t.ne) for t in synthetic(name).tensors.values())
    assert parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_gpt2() -> None:
    logits = a_model("gpt2", 1).logits(IDS[:8])
    assert np.isfinite(logits).all() and 0.5 < logits.std() < 2


# ---- encoders ----


@pytest.fixture
def small_encoder(monkeypatch: pytest.MonkeyPatch) -> str:
    sizes = {"block_count": 2, "context_length": 96, "vocab_size": 64}
    bge = RECIPES["bge-small"]
    monkeypatch.setitem(RECIPES, "small-bge", replace(bge, keys={**bge.keys, **sizes}))
    return "small-bge"


def test_an_encoders_texts(bench: Bench, small_encoder: str) -> None:
    """Packed beside dense, of which the results are the same."""
    code, out, _ = bench("--synthetic", small_encoder, "-p", "40", "-r", "2", "--batch", "1,between:6:9:60", "--json")
    rows = json.loads(out)["results"]
    assert code == 0 and [row["test"] for row in rows] == ["embed40", "embed x 6 between 32"]
    for row, texts in zip(rows, (1, 6)):
        assert row["texts"] == texts and row["tokens_per_s"] > 0 and row["deviation"] >= 0
        assert row["dense_ratio"] == pytest.approx(row["tokens_per_s"] / row["dense"]["tokens_per_s"])
        assert row["n_batch"] == row["dense"]["n_batch"] == 512
    products = 2 * 2 * (4 * 384 * 384 + 2 * 384 * 1536)
    assert rows[0]["gflop_per_s"] * 1e9 / rows[0]["tokens_per_s"] == pytest.approx(products + 2 * 2 * 2 * 384 * 40)
    shown = bench_verb._row(json.loads(out), rows[1] | {"share": 0.5})
    assert shown["of dense"] == f"{rows[1]['dense_ratio']:.2f}" and shown["rate"].endswith("FLOP/s")
    too_long = "1 to 96 tokens, the model's own limit, got 97"
    for more, said in ((("-p", "97"), too_long), (("-p", "0", "-n", "0"), "there must be a test")):
        code, _, err = bench("--synthetic", small_encoder, *more)
        assert code == 2 and said in err


@pytest.mark.parametrize("causal", [False, True])
def test_the_dense_form_is_the_packed_one(small_encoder: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {**RECIPES[small_encoder].keys, "attention.causal": causal}
    monkeypatch.setitem(RECIPES, small_encoder, replace(RECIPES[small_encoder], keys=keys))
    model = a_model(small_encoder)
    texts = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in (3, 50, 17, 1)]
    for pooling in ("mean", "none"):
        packed = Embedder(model.encoder, model.backends).embed(texts, pooling)
        dense = DenseEmbedder(model.encoder, model.backends).embed(texts, pooling)
        assert all(nmse(a, b) < 1e-8 for a, b in zip(packed, dense))


@pytest.mark.usefixtures("broken")
def test_wrong_embeddings_are_not_reported(bench: Bench, small_encoder: str) -> None:
    code, out, err = bench("--synthetic", small_encoder, "--backend", "wrong", "-p", "8")
    assert (code, out) == (1, "") and err.startswith("not measured: embeddings differ from the reference by NMSE ")
