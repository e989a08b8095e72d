"""`graphrt quantize`, `split` and `merge`: which tensor gets which type, what the files hold, what is refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from support import gguf_files, tiny_archs  # noqa: F401 (its models are found by name)
from support.gguf_files import KV, sample_kv, sample_tensors, write_gguf
from support.tiny import CHAT, write_model
from support.verbs import Verb

from graphrt.dtypes import TYPES
from graphrt.errors import GGUFError
from graphrt.models import gguf_split, load
from graphrt.models.gguf import GGUFFile, TensorInfo
from graphrt.models.quantize.mixtures import FILE_TYPES, Request, Traits, choose, file_type, traits_of
from graphrt.models.quantize.run import plan, write


@pytest.fixture
def graphrt(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb(capsys)


# ---- which type ----


def layer(il: int, n: int, *, qkv: bool = False, experts: bool = False) -> list[TensorInfo]:
    names = ["attn_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down", "attn_output"]
    names += ["attn_qkv"] if qkv else ["attn_q", "attn_k", "attn_v"]
    if experts:
        names = [f"{name}_exps" if name.startswith("ffn_") and "norm" not in name else name for name in names]
        names.append("ffn_gate_inp")
    ne = {name: (n,) if "norm" in name else (n, n, 8) if name.endswith("_exps") else (n, n) for name in names}
    return [TensorInfo(f"blk.{il}.{name}.weight", TYPES["f32" if "norm" in name else "f16"], ne[name], 0, 0)
            for name in names]  # fmt: skip


def model(n_layer: int, n: int = 1024, *, tied: bool = False, **how: bool) -> list[TensorInfo]:
    top = [TensorInfo("token_embd.weight", TYPES["f16"], (n, 300), 0, 0)]
    top += [] if tied else [TensorInfo("output.weight", TYPES["f16"], (n, 300), 0, 0)]
    return [*top, *(info for il in range(n_layer) for info in layer(il, n, **how))]


def types(name: str, tensors: list[TensorInfo], traits: Traits, **request: object) -> dict[str, str]:
    """The type of each tensor by its name, "blk." and ".weight" left out."""
    chosen = choose(tensors, replace(Request(file_type(name)), **request), traits)  # type: ignore[arg-type]
    short = [info.name.removeprefix("blk.").removesuffix(".weight") for info in tensors]
    return {key: dt.name for key, dt in zip(short, chosen)}


#: Of 32 layers: the first and the last eighth, and every third between.
MORE = {*range(4), 6, 9, 12, 15, 18, 21, 24, 27, *range(28, 32)}
LLAMA = Traits("llama", 32, n_gqa=4)


def test_q4_k_m_of_a_llama_is_as_published() -> None:
    found = types("Q4_K_M", model(32), LLAMA)
    assert found["token_embd"] == "q4_K" and found["output"] == "q6_K"
    for part in ("attn_v", "ffn_down"):
        assert {il for il in range(32) if found[f"{il}.{part}"] == "q6_K"} == MORE, part
        assert all(found[f"{il}.{part}"] == "q4_K" for il in set(range(32)) - MORE)
    for part in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
        assert {found[f"{il}.{part}"] for il in range(32)} == {"q4_K"}
    assert found["0.attn_norm"] == "f32"


#: By file type: those of token_embd, output, then attn_v, ffn_down and attn_output of layers 0, 5 and 31.
MIXTURES = {
    "Q2_K": "q2_K q6_K | q4_K q4_K q4_K | q3_K q3_K q3_K | q3_K q3_K q3_K",
    "Q2_K_S": "q2_K q6_K | q4_K q4_K q4_K | q4_K q2_K q2_K | q2_K q2_K q2_K",
    "Q3_K_S": "q3_K q6_K | q3_K q3_K q3_K | q3_K q3_K q3_K | q3_K q3_K q3_K",
    "Q3_K_M": "q3_K q6_K | q5_K q4_K q4_K | q5_K q4_K q4_K | q4_K q4_K q4_K",
    "Q3_K_L": "q3_K q6_K | q5_K q5_K q5_K | q5_K q5_K q5_K | q5_K q5_K q5_K",
    "Q4_K_S": "q4_K q6_K | q5_K q4_K q4_K | q5_K q4_K q4_K | q4_K q4_K q4_K",
    "Q4_K_M": "q4_K q6_K | q6_K q4_K q6_K | q6_K q4_K q6_K | q4_K q4_K q4_K",
    "Q5_K_S": "q5_K q6_K | q5_K q5_K q5_K | q5_K q5_K q5_K | q5_K q5_K q5_K",
    "Q5_K_M": "q5_K q6_K | q6_K q5_K q6_K | q6_K q5_K q6_K | q5_K q5_K q5_K",
    "Q6_K": "q6_K q6_K | q6_K q6_K q6_K | q6_K q6_K q6_K | q6_K q6_K q6_K",
    "IQ4_XS": "iq4_xs q6_K | q5_K q5_K q5_K | q5_K iq4_xs iq4_xs | iq4_xs iq4_xs iq4_xs",
    "Q4_0": "q4_0 q6_K | q4_0 q4_0 q4_0 | q4_0 q4_0 q4_0 | q4_0 q4_0 q4_0",
    "Q8_0": "q8_0 q8_0 | q8_0 q8_0 q8_0 | q8_0 q8_0 q8_0 | q8_0 q8_0 q8_0",
    "TQ2_0": "q4_K q6_K | tq2_0 tq2_0 tq2_0 | tq2_0 tq2_0 tq2_0 | tq2_0 tq2_0 tq2_0",
    "F16": "f16 f16 | f16 f16 f16 | f16 f16 f16 | f16 f16 f16",
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures(name: str) -> None:
    found = types(name, model(32), LLAMA)
    parts = [" ".join(found[f"{il}.{part}"] for il in (0, 5, 31)) for part in ("attn_v", "ffn_down", "attn_output")]
    assert " | ".join([f"{found['token_embd']} {found['output']}", *parts]) == MIXTURES[name]


def test_what_sets_models_apart() -> None:
    assert types("Q2_K", model(4), Traits("llama", 4, n_gqa=1))["1.attn_v"] == "q3_K"
    assert types("Q4_K_M", model(8, tied=True), Traits("llama", 8))["token_embd"] == "q6_K", "it is the output too"
    eight = types("Q4_K_M", model(8, experts=True), Traits("llama", 8, 4, n_expert=8))
    assert {eight[f"3.attn_{part}"] for part in "vk"} == {"q8_0"} and eight["3.attn_output"] == "q5_K"
    assert (
        eight["3.ffn_gate_inp"] == "f16" and eight["3.ffn_down_exps"] == "q6_K" and eight["4.ffn_down_exps"] == "q4_K"
    )
    falcon = types("Q4_K_M", model(32, qkv=True), Traits("falcon", 32))
    assert [falcon[f"{il}.ffn_down"] for il in (0, 2, 5, 31)] == ["q6_K", "q5_K", "q4_K", "q5_K"]
    assert falcon["output"] == "q8_0" and [falcon[f"{il}.attn_qkv"] for il in (0, 5)] == ["q6_K", "q4_K"]
    large = types("Q4_K_M", model(80), Traits("llama", 80, 8, is_70b=True))
    assert {large[f"{il}.attn_v"] for il in range(80)} == {"q5_K", "q6_K"}
    mixed = types("MXFP4_MOE", model(2, experts=True), Traits("gpt-oss", 2, 8, n_expert=32))
    assert (mixed["0.ffn_up_exps"], mixed["0.attn_q"], mixed["output"]) == ("mxfp4", "q8_0", "q8_0")


def test_importances_guard_the_first_layers_of_simple_types() -> None:
    found = types("Q4_0", model(32), LLAMA, has_importance=True)
    assert [found[f"{il}.ffn_down"] for il in (0, 3, 4)] == ["q4_1", "q4_1", "q4_0"]
    assert types("IQ4_XS", model(32), LLAMA, has_importance=True)["0.ffn_down"] == "iq4_xs"


def test_rows_that_are_no_whole_blocks_get_smaller_ones() -> None:
    for name, smaller in (("Q4_K_S", "q5_0"), ("Q5_K_S", "q5_1"), ("Q6_K", "q8_0"), ("Q3_K_S", "q4_0"),
                          ("Q2_K_S", "q4_0"), ("IQ4_XS", "iq4_nl"), ("TQ1_0", "q4_0")):  # fmt: skip
        assert types(name, model(8, n=96), Traits("llama", 8))["5.ffn_up"] == smaller, name
    assert types("Q4_K_M", model(8, n=96), Traits("llama", 8))["output"] == "q8_0"
    assert types("Q4_0", model(1, n=40), Traits("llama", 1))["0.ffn_up"] == "f16"


def test_types_that_are_asked_for() -> None:
    pure = types("Q4_K_M", model(8), Traits("llama", 8), pure=True)
    assert {pure["output"], pure["token_embd"], pure["0.attn_v"]} == {"q4_K"}
    own = {"output": TYPES["f16"], "token_embd": TYPES["q8_0"]}
    found = types("Q4_K_M", model(8), Traits("llama", 8), **own)
    assert (found["output"], found["token_embd"]) == ("f16", "q8_0")
    shared = types("Q4_K_M", model(8, tied=True), Traits("llama", 8), output=TYPES["q5_K"])
    assert shared["token_embd"] == "q5_K"
    assert file_type("q4_k").name == "Q4_K_M" and file_type("iq4_nl").main == TYPES["iq4_nl"]
    with pytest.raises(GGUFError, match=r"must be one of F32, F16.*got 'Q9_X'"):
        file_type("Q9_X")


def test_traits_come_from_keys() -> None:
    keys = {"general.architecture": "llama", "llama.block_count": 80, "llama.attention.head_count": 64,
            "llama.attention.head_count_kv": np.array([8, 8], np.int32), "llama.expert_count": 8}  # fmt: skip
    assert traits_of(keys, {}) == Traits("llama", 80, 8, 8, True)
    names = {info.name: info for info in model(5)}
    assert traits_of({"general.architecture": "gpt2"}, names) == Traits("gpt2", 5, 1)


# ---- files ----


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "f32.gguf", "phi3-wide", tokenizer="spm", chat=CHAT)


def quantized(source: Path, target: Path, name: str) -> Path:
    with GGUFFile.open(source) as file:
        write(file, plan(file, Request(file_type(name))), target)
    return target


@pytest.mark.parametrize(
    "name", ["F16", "BF16", "Q8_0", "Q5_K_M", "Q4_K_M", "Q3_K_S", "Q2_K_S", "Q4_1", "IQ4_XS", "TQ2_0"]
)
def test_every_type_makes_a_model_that_runs(name: str, source: Path, tmp_path: Path) -> None:
    path = quantized(source, tmp_path / "q.gguf", name)
    with GGUFFile.open(source) as old, GGUFFile.open(path) as new:
        assert new.metadata["general.file_type"] == FILE_TYPES[name].number
        assert list(new.tensors) == list(old.tensors)
        assert any(t.dtype == FILE_TYPES[name].main for t in new.tensors.values())
        for tensor in old.tensors:
            a, b = old.dequantize(tensor).astype(np.float64), new.dequantize(tensor)
            lost = np.square(a - b).sum() / np.square(a).sum()
            bound = {"tq1_0": 0.5, "tq2_0": 0.5, "q2_K": 0.1, "q3_K": 0.03}.get(new.tensors[tensor].dtype.name, 0.02)
            assert lost <= bound, f"{tensor} of {new.tensors[tensor].dtype}: {lost}"
    if name in ("Q4_K_M", "IQ4_XS"):
        rows = load(path, "cpu").logits([1, 5, 9])
        assert np.isfinite(rows).all()


def test_the_gguf_package_reads_what_is_written(source: Path, tmp_path: Path) -> None:
    path = quantized(source, tmp_path / "q.gguf", "Q4_K_M")
    ours, theirs = gguf.GGUFReader(path), gguf.GGUFReader(source)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            copy = ours.fields[key]
            assert copy.types == field.types and [*map(bytes, copy.parts)] == [*map(bytes, field.parts)], key
    new = {"general.file_type", "general.quantization_version"}
    assert set(ours.fields) - set(theirs.fields) == new
    assert [t.name for t in ours.tensors] == [t.name for t in theirs.tensors]


def test_keys_are_kept_to_the_bit(tmp_path: Path) -> None:
    """Of every value type, with strings that are no UTF-8, in a file of another alignment."""
    kv: list[KV] = [*sample_kv()]
    kv[1] = ("general.alignment", "u32", 64)
    path = write_gguf(tmp_path / "a.gguf", kv, sample_tensors(), alignment=64)
    with GGUFFile.open(path) as file:
        write(file, plan(file, Request(file_type("F32"), pure=True), requantize=True), tmp_path / "b.gguf")
        with GGUFFile.open(tmp_path / "b.gguf") as copy:
            assert copy.alignment == 64
            raw = copy.raw_values()
            assert raw.items() >= file.raw_values().items() and len(raw) == len(kv) + 2
            assert copy.tensors["token_embd.weight"].dtype.name == "f32"
            for name in ("blk.0.attn_norm.weight", "blk.0.empty", "blk.0.ids"):
                assert bytes(copy.data(name)) == bytes(file.data(name))


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "big.gguf", sample_kv(), sample_tensors(">"), order=">")
    with GGUFFile.open(path) as file, pytest.raises(GGUFError, match="big-endian"):
        plan(file, Request(file_type("F32")), requantize=True)


def test_quantizing_twice_must_be_asked_for(graphrt: Verb, source: Path, tmp_path: Path) -> None:
    small = quantized(source, tmp_path / "small.gguf", "Q8_0")
    result = graphrt("quantize", small, tmp_path / "out.gguf", "Q4_K_M")
    assert result.code == 2 and "quantized already (q8_0)" in result.err and "--allow-requantize" in result.err
    assert not (tmp_path / "out.gguf").exists()
    assert graphrt("quantize", small, tmp_path / "out.gguf", "Q4_K_M", "--allow-requantize").code == 0
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        assert file.tensors["blk.0.ffn_up.weight"].dtype == TYPES["q4_K"]


def test_a_dry_run_tells_the_size_and_writes_nothing(graphrt: Verb, source: Path, tmp_path: Path) -> None:
    dry = graphrt("quantize", source, "Q5_K_M", "--dry-run", "--json").json()
    assert dry["output"] is None and all(t["error"] is None for t in dry["tensors"])
    out = tmp_path / "q.gguf"
    wet = graphrt("quantize", source, out, "Q5_K_M", "--json").json()
    assert wet["bytes"] == dry["bytes"] == out.stat().st_size and wet["output"] == str(out)
    with GGUFFile.open(source) as old, GGUFFile.open(out) as new:
        for row in wet["tensors"]:
            a, b = old.dequantize(row["name"]).astype(np.float64), new.dequantize(row["name"])
            assert row["error"] == pytest.approx(np.square(a - b).sum() / np.square(a).sum(), rel=1e-4)
            assert (row["from"], row["bytes"]) == ("f32", new.tensors[row["name"]].nbytes)
    plain = graphrt("quantize", source, out, "Q5_K_M", "--tensors")
    assert "blk.0.ffn_up.weight" in plain.out and "bits a weight" in plain.out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("Q4_K_M",), "a file to write must be given"),
        (("out.gguf", "Q4_X"), "must be one of F32, F16"),
        (("out.gguf", "Q4_0", "--output-tensor-type", "iq1_s"), "a tensor's type must be one of f32, f16"),
        (("no/such/folder/q.gguf", "Q4_0"), "can't be written"),
        ((".", "Q4_0"), "must not be a folder"),
    ],
)
def test_what_quantize_refuses(graphrt: Verb, source: Path, tmp_path: Path, argv: Sequence[str], says: str,
                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    result = graphrt("quantize", source, *argv)
    assert result.code == 2 and says in result.err and result.err.count("\n") <= 3
    assert list(tmp_path.iterdir()) == []


def test_the_source_is_never_written_over(graphrt: Verb, source: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(source)
    before = source.read_bytes()
    result = graphrt("quantize", source, link, "Q8_0")
    assert result.code == 2 and "must not be the one that is read" in result.err and source.read_bytes() == before


def test_a_failing_write_leaves_the_old_file(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "q.gguf"
    target.write_bytes(b"old")
    target.chmod(0o640)

    def interrupted(step: object, error: float) -> None:
        raise KeyboardInterrupt

    with GGUFFile.open(source) as file:
        with pytest.raises(KeyboardInterrupt):
            write(file, plan(file, Request(file_type("Q8_0"))), target, done=interrupted)
        assert target.read_bytes() == b"old" and os.listdir(tmp_path) == ["q.gguf"]
        write(file, plan(file, Request(file_type("Q8_0"))), target)
    assert target.stat().st_mode & 0o777 == 0o640 and os.listdir(tmp_path) == ["q.gguf"]


def test_values_that_are_not_finite_are_told_with_their_tensor(tmp_path: Path) -> None:
    data = np.zeros(512, np.float32)
    data[300] = np.nan
    kv: list[KV] = [("general.architecture", "string", "llama")]
    path = write_gguf(tmp_path / "a.gguf", kv, [("blk.0.ffn_up.weight", "f32", (256, 2), data.tobytes())])
    with GGUFFile.open(path) as file, pytest.raises(GGUFError, match=r"blk\.0\.ffn_up\.weight: values must be finite"):
        write(file, plan(file, Request(file_type("Q4_K_M"))), tmp_path / "b.gguf")
    assert os.listdir(tmp_path) == ["a.gguf"]


def test_large_tensors_go_through_in_pieces(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphrt.models.quantize import run

    whole = quantized(source, tmp_path / "whole.gguf", "Q4_K_M").read_bytes()
    sizes = []
    real = run.quantize
    monkeypatch.setattr(run, "quantize", lambda rows, *more: (sizes.append(rows.size), real(rows, *more))[1])
    monkeypatch.setattr(run, "SLAB", 32768)
    assert quantized(source, tmp_path / "pieces.gguf", "Q4_K_M").read_bytes() == whole
    assert max(sizes) <= 32768 and len(sizes) > 20


# ---- parts ----


def bits(path: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    with GGUFFile.open(path) as file:
        return file.raw_values(), {name: bytes(file.data(name)) for name in file.tensors}


def test_parts_load_as_one_and_merge_to_the_same_file(graphrt: Verb, source: Path, tmp_path: Path) -> None:
    found = graphrt("split", source, tmp_path / "p", "--max-tensors", "7", "--json").json()
    n = len(GGUFFile.open(source).tensors)
    count = -(-n // 7)
    assert [part["tensors"] for part in found["parts"]] == [7] * (count - 1) + [n - 7 * (count - 1)]
    first = tmp_path / f"p-00001-of-{count:05d}.gguf"
    assert found["parts"][0]["path"] == str(first)
    reader = gguf.GGUFReader(tmp_path / f"p-00002-of-{count:05d}.gguf")
    values = {key: (f.types[0].name, f.contents()) for key, f in reader.fields.items() if key.startswith("split.")}
    assert values == {
        "split.no": ("UINT16", 1), "split.count": ("UINT16", count), "split.tensors.count": ("INT32", n),
    }  # fmt: skip
    wanted = load(source, "cpu").logits([1, 5, 9, 2])
    assert np.array_equal(load(first, "cpu").logits([1, 5, 9, 2]), wanted)
    merged = tmp_path / "m.gguf"
    assert graphrt("merge", first, merged, "--json").json()["parts"] == count
    assert bits(merged) == bits(source)
    graphrt("quantize", first, tmp_path / "q.gguf", "Q4_0")
    assert bits(tmp_path / "q.gguf") == bits(quantized(source, tmp_path / "r.gguf", "Q4_0")), "without split keys"


@pytest.mark.parametrize("limit", [40_000, 200_000, 10**9])
def test_parts_are_no_larger_than_asked(source: Path, tmp_path: Path, limit: int) -> None:
    with GGUFFile.open(source) as file:
        parts = gguf_split.planned_parts(file, max_bytes=limit)
        paths = gguf_split.split(file, tmp_path / "p", parts)
        assert [info.name for part in parts for info in part] == list(file.tensors)
    sizes = [path.stat().st_size for path in paths]
    assert all(size <= limit or len(part) == 1 for size, part in zip(sizes, parts)), sizes
    if limit == 200_000:
        assert max(len(part) for part in parts) > 1 < len(parts)


def test_what_tensors_take_in_headers_counts(tmp_path: Path) -> None:
    kv: list[KV] = [("general.architecture", "string", "llama")]
    small = [(f"blk.0.a_rather_long_name_of_a_tensor.{i:03d}.weight", "f32", (2,), bytes(8)) for i in range(100)]
    with GGUFFile.open(write_gguf(tmp_path / "m.gguf", kv, small)) as file:
        paths = gguf_split.split(file, tmp_path / "p", gguf_split.planned_parts(file, max_bytes=2000))
    sizes = [path.stat().st_size for path in paths]
    assert max(sizes) <= 2000 and len(paths) < 12


def test_what_split_and_merge_refuse(graphrt: Verb, source: Path, tmp_path: Path) -> None:
    assert "must be a whole number" in graphrt("split", source, tmp_path / "p", "--max-size", "2T").err
    assert graphrt("split", source, tmp_path / "p").code == 2
    assert graphrt("split", source, tmp_path / "p", "--max-size", "1M", "--dry-run").code == 0
    assert os.listdir(tmp_path) == []
    n = len(gguf_split.planned_parts(GGUFFile.open(source), max_bytes=10**6))
    last = tmp_path / f"p-{n:05d}-of-{n:05d}.gguf"
    last.write_bytes(b"mine")
    result = graphrt("split", source, tmp_path / "p", "--max-size", "1M")
    assert result.code == 2 and "must not be there yet" in result.err and os.listdir(tmp_path) == [last.name]
    result = graphrt("merge", source, last)
    assert result.code == 2 and last.read_bytes() == b"mine"


def test_a_split_that_fails_leaves_no_parts(source: Path, tmp_path: Path) -> None:
    with GGUFFile.open(source) as file:
        seen = []

        def full(name: str) -> None:
            seen.append(name)
            if len(seen) == 9:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            gguf_split.split(file, tmp_path / "p", gguf_split.planned_parts(file, max_tensors=4), full)
    assert os.listdir(tmp_path) == []


def test_files_of_strangers(graphrt: Verb, tmp_path: Path) -> None:
    """Names and values that no honest file has: a sentence, never a traceback."""
    empty = write_gguf(tmp_path / "empty.gguf", [("general.architecture", "string", "llama")], [])
    assert "must have tensors" in graphrt("quantize", empty, tmp_path / "o.gguf", "Q4_0").err
    kv: list[KV] = [("general.architecture", "string", "llama"), ("llama.expert_count", "u32", 8)]
    names = ("blk.99999999999.ffn_down_exps.weight", "ffn_down_exps.weight", "\x1b[2J.weight")
    for name in names:
        odd = write_gguf(tmp_path / "odd.gguf", kv, [(name, "f32", (32, 2), gguf_files.random_blocks("f32", 64))])
        result = graphrt("quantize", odd, tmp_path / "o.gguf", "Q4_0")
        assert result.code in (0, 2) and "Traceback" not in result.err and "\x1b" not in result.out + result.err
