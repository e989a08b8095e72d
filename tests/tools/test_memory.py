"""`graphrt memory`: lifetimes and the check of the plan, the figures, the picture, the longest context that fits."""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.tiny import write_model
from support.toy import ToyBackend

from graphrt import Executable, Graph, get_backend, new_input, ops, plan, prepare
from graphrt.backend import Backend
from graphrt.backends.cpu.backend import CpuBackend
from graphrt.errors import MemoryPlanError
from graphrt.execute import plan_arenas
from graphrt.models import Model, load
from graphrt.models.engine import SessionOptions
from graphrt.models.gguf import GGUFFile
from graphrt.models.longest import context_needs, longest_context
from graphrt.models.memory import check_fits, memory_needs
from graphrt.models.paging import prefixes
from graphrt.models.synthetic import synthetic
from graphrt.tools import cli
from graphrt.tools.inspect.subject import Subject, subject
from graphrt.tools.memory.lifetimes import ArenaLives, Life, Step, arenas_of, violations
from graphrt.tools.memory.report import MemoryReport, arena_report, peak, report
from graphrt.tools.memory.svg import KINDS, kind_of, svg
from graphrt.tools.verbs.memory import size

OPTIONS = SessionOptions(n_ctx=64, n_batch=32)

SCRIPT = """
import graphrt
from graphrt import ops

def build():
    a = graphrt.new_input("f32", 64, 4, name='a "<b>" \\x1b')
    first = ops.sqr(a, name="first")
    second = ops.sqrt(first, name="second")
    third = ops.sum_rows(second, name="third")
    return graphrt.Graph(ops.mul(second, third, name="</title>out"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    write_model(folder / "llama.gguf", "llama")
    write_model(folder / "gemma3.gguf", "gemma3")
    (folder / "script.py").write_text(SCRIPT)
    return folder


def backends(name: str) -> list[Backend]:
    if name == "toy":
        return [ToyBackend(), get_backend("cpu")]
    kind, _, form = name.partition("-")
    return [get_backend(kind, exact=form == "exact")]


# ---- the check of a plan ----


def life(number: int, offset: int, nbytes: int, first: int, last: int, in_place: tuple[int, ...] = ()) -> Life:
    return Life(number, f"t{number}", "ADD", "cpu", offset, nbytes, first, last, in_place)


def arena(*lives: Life) -> ArenaLives:
    return ArenaLives("cpu", 1024, 64, lives)


PLANS = {
    "one after another": ((life(0, 0, 100, 0, 2), life(1, 0, 100, 3, 4)), 0),
    "side by side": ((life(0, 0, 64, 0, 2), life(1, 64, 64, 0, 2)), 0),
    "in place": ((life(0, 0, 100, 0, 2), life(1, 0, 100, 2, 4, (0,)), life(2, 0, 100, 4, 5, (1,))), 0),
    "overlap": ((life(0, 0, 100, 0, 2), life(1, 64, 100, 1, 4)), 1),
    "one inside another": ((life(0, 0, 512, 0, 9), life(1, 64, 4, 3, 3)), 1),
    "the younger below": ((life(0, 64, 100, 0, 2), life(1, 0, 100, 2, 4)), 1),
    "in place, not allowed": ((life(0, 0, 100, 0, 2), life(1, 0, 100, 2, 4)), 1),
    "in place of another": ((life(0, 0, 100, 0, 2), life(1, 0, 100, 2, 4, (5,))), 1),
    "in place, read later": ((life(0, 0, 100, 0, 3), life(1, 0, 100, 2, 4, (0,))), 1),
    "in place, moved": ((life(0, 0, 100, 0, 2), life(1, 64, 100, 2, 4, (0,))), 1),
    "in place of one, over a third": (
        (life(0, 0, 64, 0, 2), life(1, 0, 128, 2, 4, (0,)), life(2, 64, 64, 0, 2)),
        1,
    ),
    "three": (tuple(life(i, 0, 64, 0, 1) for i in range(3)), 3),
    "outside": ((life(0, 960, 65, 0, 1),), 1),
    "before the start": ((life(0, -64, 64, 0, 1),), 1),
    "unaligned": ((life(0, 32, 64, 0, 1),), 1),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_check(name: str) -> None:
    lives, count = PLANS[name]
    for order in (lives, lives[::-1]):
        assert len(violations(arena(*order))) == count


def test_a_violation_names_both_tensors() -> None:
    (found,) = violations(arena(life(1, 64, 100, 1, 4), life(0, 0, 100, 0, 2)))
    assert str(found) == (
        "two tensors that are alive at one step must not share bytes: 't0' (ADD) at bytes 0 to 99, steps 0 to 2 "
        "and 't1' (ADD) at bytes 64 to 163, steps 1 to 4"
    )


def shared(found: ArenaLives) -> int:
    """Pairs of tensors that are alive at one step at one offset: results in place."""
    return sum(b.first == a.last and a.offset == b.offset and a is not b for a in found.lives for b in found.lives)


@pytest.mark.parametrize("backend", ["cpu-exact", "cpu-fast", "toy", "triton-exact", "triton-fast"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_real_plans_are_sound_and_the_figures_agree(folder: Path, backend: str, phase: str) -> None:
    """Walking what runs, without the planner, finds the planner's own figures."""
    for model in ("llama", "gemma3"):
        found = subject(str(folder / f"{model}.gguf"), backends(backend), phase, options=OPTIONS)
        told = report(found)
        assert not told.wrong and len(told.steps) == sum(len(s.groups) for s in found.executable.splits)
        assert {a.arena.backend for a in told.arenas} == set(found.executable.arenas)
        for part in told.arenas:
            made = found.executable.arenas[part.arena.backend].plan
            assert (part.arena.nbytes, part.alone) == (made.peak, made.total)
            assert (part.peak.nbytes, part.peak.step) == (made.live_peak, made.peak_step)
            assert part.peak.gaps >= 0 and part.peak.top <= part.arena.nbytes and part.saved >= 0
            assert len(part.arena.lives) == len(made.offsets)
        if backend.endswith("exact"):
            assert any(shared(part.arena) for part in told.arenas), "results in place are there, and are no violation"


def doubled() -> Executable:
    a = new_input("f32", 64, 4, name="a")
    b = ops.sqr(a, name="b")
    c = ops.sum_rows(b, name="c")
    return prepare(Graph(ops.mul(b, c, name="d")), get_backend("cpu"))


def test_a_planted_overlap_is_found() -> None:
    exe = doubled()
    assert violations(arenas_of(exe)[0]) == []
    offsets = exe.arenas["cpu"].plan.offsets
    place = {t.name: t for t in offsets}  # type: ignore[attr-defined]
    offsets[place["c"]] = offsets[place["b"]]  # b is read again after c
    pairs = [{x.name for x in v.tensors} for v in violations(arenas_of(exe)[0])]
    assert {"b", "c"} in pairs


PLANTED: dict[str, tuple[str, Callable[..., object]]] = {
    "no gap is looked for": ("_best_fit", lambda live, size: 0),
    "taken while needed": ("_can_give", lambda chain, key, size, step: chain.size >= size),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planner_that_overlaps_is_found(
    bug: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["memory", str(folder / "llama.gguf"), "--backend", "cpu", "--exact", "-c", "64"]
    assert cli.main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["violations"] == []
    monkeypatch.setattr(plan, *PLANTED[bug])
    assert cli.main(argv) == 1
    told = capsys.readouterr()
    assert "must not share bytes: '" in told.out and ", steps " in told.out and told.err == ""
    assert " violations" in told.out and told.out.count("must not share") <= 20
    assert cli.main([*argv, "--json"]) == 1
    (wrong, *_) = json.loads(capsys.readouterr().out)["violations"]
    assert len(wrong["tensors"]) == 2 and wrong["tensors"][0]["name"] != wrong["tensors"][1]["name"]


# ---- figures ----


def test_the_peak_by_hand() -> None:
    """Step 1: 64 + 128 (100, rounded up) at 0 and 256, so that 192 lie in a gap."""
    found = peak(arena(life(0, 0, 64, 0, 1), life(1, 256, 100, 1, 2), life(2, 0, 64, 2, 3)))
    assert (found.step, found.nbytes, found.top, found.gaps) == (1, 192, 384, 192)
    assert [x.number for x in found.lives] == [1, 0]


def test_what_two_share_in_place_counts_once() -> None:
    found = peak(arena(life(0, 0, 64, 0, 1), life(1, 0, 64, 1, 2, (0,))))
    assert (found.nbytes, found.gaps) == (64, 0)


def test_weights_and_cache_by_hand(folder: Path) -> None:
    options = replace(OPTIONS, type_k="f32")
    found = subject(str(folder / "gemma3.gguf"), backends("cpu-fast"), options=options)
    told = report(found)
    assert found.session is not None
    assert [(r.dtype, r.share) for r in told.weights] == [("f32", 1.0)]
    assert sum(r.nbytes for r in told.cache) == found.session.cache.nbytes
    by_kind = {(r.what, r.dtype): (r.count, r.nbytes) for r in told.cache}
    ring = 12 + 32  # the window and a batch
    assert by_kind[("full k", "f32")] == (1, 64 * 32 * 4) and by_kind[("swa v", "f16")] == (6, 6 * ring * 32 * 2)


def test_weights_count_as_they_are_stored() -> None:
    model = Model(synthetic("tiny:q4_0", 1), backends("triton-fast"))
    exe = model.session(OPTIONS).executable(1, 1)
    told = report(Subject("tiny", "decode", 1, exe))
    packed = [t.buffer for t in model.weights.loaded.values() if t.dtype.name == "q4_0" and t.buffer is not None]
    stored = {r.dtype: r.nbytes for r in told.weights}
    assert stored["q4_0"] == sum(b.footprint for b in packed) and {r.what for r in told.cache} == {"state"}
    assert all(b.footprint == b.packed.nbytes for b in packed if hasattr(b, "packed"))


# ---- the longest context ----


@pytest.mark.parametrize("backend", ["cpu-fast", "triton-fast"])
@pytest.mark.parametrize("n_ctx", [1, 40, 64])
def test_needs_are_what_a_session_then_takes(folder: Path, backend: str, n_ctx: int) -> None:
    model = load(folder / "gemma3.gguf", backends(backend))
    options = SessionOptions(n_ctx, 32)
    needs = context_needs(model.decoder, model.backends, options)
    session = model.session(options)
    arenas = [session.executable(n, 1).arenas[needs.backend].plan.peak for n in {session.n_batch, 1}]
    assert needs.cache == session.cache.nbytes and needs.prefill + needs.decode == sum(arenas)
    assert needs.total == needs.weights + needs.cache + sum(arenas)


def test_the_longest_context_by_hand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama has 2 layers of k and v of 32 elements in f16: 256 bytes a token. Without any allocation."""
    model = load(folder / "llama.gguf", "cpu")
    options = SessionOptions(n_batch=8)
    sessions = {n: model.session(replace(options, n_ctx=n)) for n in (100, 101)}
    arenas = {n: sum(s.executable(k, 1).arenas["cpu"].plan.peak for k in (8, 1)) for n, s in sessions.items()}
    room = {n: model.weights.nbytes + 256 * n + arenas[n] for n in sessions}
    monkeypatch.setattr(CpuBackend, "alloc", lambda *args: pytest.fail("memory was taken"))
    for limit, n in ((room[100], 100), (room[101] - 1, 100), (room[101], 101), (2**30, 256)):
        found = longest_context(model.decoder, model.backends, options, limit)
        assert found is not None and found.n_ctx == n and found.total <= limit
        assert (found.weights, found.cache) == (model.weights.nbytes, 256 * n)
    assert longest_context(model.decoder, model.backends, options, model.weights.nbytes) is None


def test_a_planned_graph_takes_the_plan_of_a_prepared_one() -> None:
    exe = doubled()
    (planned,) = plan_arenas(exe.graph, [get_backend("cpu")]).values()
    assert planned.offsets == exe.arenas["cpu"].plan.offsets
    with pytest.raises(MemoryPlanError, match="no memory to read"):
        from graphrt.backend import Usage
        from graphrt.models.longest import _Promising

        _Promising("cpu").alloc(4, Usage.STATE).read(0, 4)


def test_limit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["memory", str(folder / "llama.gguf"), "--backend", "cpu", "-c", "16", "-b", "8"]
    assert cli.main([*argv, "--limit", "1G", "--cache-types"]) == 0
    said = capsys.readouterr().out
    assert "the longest context in 1.0 GiB" in said and "the model's own limit" in said and "counted: all" in said
    assert "needs heads of whole blocks of 32 elements" in said, "q8_0 and q4_0 can't be"
    assert cli.main([*argv, "--limit", "1G", "--json"]) == 0
    (fit,) = json.loads(capsys.readouterr().out)["limit"]["contexts"]
    assert fit["n_ctx"] == 256 and fit["needs"]["cache"] == 256 * 256
    assert cli.main([*argv, "--limit", "10K"]) == 1
    assert "not even one token fits; raise the limit" in capsys.readouterr().out


def test_pages(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine: how many, and the tables that a step is given."""
    monkeypatch.chdir(folder)
    argv = ["memory", "llama.gguf", "--backend", "cpu", "-c", "256", "--page", "32", "--sequences", "3", "--pages", "9"]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert "decode of 3 tokens, 3 sequences, context of 256" in said
    assert "pages of 32 tokens: 9 full; each sequence's table has 8 entries" in said and "attn_inp_pages" in said
    assert cli.main([*argv, "--phase", "prefill", "--tokens", "20", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["pages"] == {"n_seq": 3, "page": 32, "n_pages": {"full": 9}, "windows": {"full": 0}, "max_blocks": 8}
    assert (told["n_ctx"], told["n_tokens"], told["phase"]) == (256, 20, "prefill")


def test_what_sequences_share(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of sequences that begin alike says what it reads once, and why; dump and explain do too."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(CpuBackend, "reads_shared_once", True)
    options = ["--backend", "cpu", "-c", "256", "--page", "32", "--sequences", "4", "--shared", "70"]
    refused = "prefixes: 2 pages shared by sequences side by side are read by each: once would save 39.5 KiB"
    for verb in ("memory", "dump", "explain"):
        assert cli.main([verb, "llama.gguf", *options]) == 0
        assert refused in capsys.readouterr().out
    monkeypatch.setattr(prefixes, "LAUNCH_BYTES", 1000)
    assert cli.main(["explain", "llama.gguf", "__fattn__-1", *options]) == 0
    said = capsys.readouterr().out
    assert "prefixes are read once (4 sequences share 2 pages): that saves" in said and "attn_inp_prefixes" in said
    assert cli.main(["explain", "llama.gguf", *options, "--phase", "prefill", "--tokens", "20", "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["pages"]["prefixes"]["groups"]
    assert group == {"first": 1, "n_seq": 3, "n_pages": 2}, "the 17 tokens of the prompt would move more than they save"
    assert cli.main(["memory", "llama.gguf", *options[:-1], "300"]) == 2
    assert "the context holds 256 tokens, got --shared 300 and 1 more" in capsys.readouterr().err


def test_needs_of_pages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As an engine then has them, and info says them."""
    file = GGUFFile.open(folder / "gemma3.gguf")
    backends = [get_backend("cpu")]
    for options, n_seq in (
        (SessionOptions(96, page=16), 3), (SessionOptions(96, 40, page=32, n_pages=7), 5), (SessionOptions(page=16), 1),
    ):  # fmt: skip
        needs = memory_needs(file, backends, options, n_seq)
        assert needs.cache == Model(file, backends).engine(n_seq, options).cache.nbytes
    assert "1 sequences" not in str(needs) and " tokens in pages of 16, f16)" in str(needs)
    assert "KV " in str(replace(needs, n_seq=9)) and "(9 sequences of up to" in str(replace(needs, n_seq=9))
    argv = ["info", str(folder / "gemma3.gguf"), "--page", "16", "--sequences", "3", "-c", "96"]
    assert cli.main([*argv, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["needs"]
    assert told["cache_bytes"] == memory_needs(file, backends, SessionOptions(96, page=16), 3).cache
    assert (told["page"], told["n_seq"]) == (16, 3) and "FLASH_ATTN_VARLEN" in told["ops"]
    assert cli.main(argv) == 0 and "cache of 96 tokens for 3 sequences in pages of 16, f16" in capsys.readouterr().out
    assert cli.main([*argv[:2], "--pages", "5"]) == 2 and "belong to pages" in capsys.readouterr().err


def test_pages_that_fit(folder: Path) -> None:
    """What is advised where memory is short is the largest that has room."""
    file = GGUFFile.open(folder / "llama.gguf")
    options = SessionOptions(256, page=16, n_pages=40)
    needs = memory_needs(file, [get_backend("cpu")], options, 6)
    short = replace(needs, in_place=False, total=2**40, free=needs.weights + needs.cache - 1)
    with pytest.raises(MemoryPlanError, match="an n_pages of at most 39 fits"):
        check_fits(short, options)
    with pytest.raises(MemoryPlanError, match="an n_ctx of at most 240 fits"):
        check_fits(replace(short, free=needs.weights + needs.cache * 96 // 40 - 1, cache=needs.cache * 96 // 40),
                   replace(options, n_pages=0))  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("llama.gguf", "--sequences", "2"), "--pages, --sequences and --shared belong to pages, got no --page"),
        (("llama.gguf", "--page", "16", "--limit", "1G"), "has pages (--page), as many as --pages says"),
        (("script.py:build", "--limit", "1G"), "a limit is for a session's context, 'script.py:build' is a graph"),
        (("llama.gguf", "--cache-types"), "--cache-types belongs to a limit, got no --limit"),
        (("llama.gguf", "--limit", "1G", "-ctk", "q8_0"), "needs heads of whole blocks"),
    ],
)
def test_what_can_not_be_asked(
    argv: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert cli.main(["memory", *argv, "--backend", "cpu"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8G", 2**33), ("1.5GiB", 3 * 2**29), ("512m", 2**29), ("1000", 1000), ("2 kB", 2048)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "0", "nan", "1e3", "8X", "9" * 400, "٣G"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be a size of at least a byte"):
        size(text)


# ---- the picture ----

SVG = "{http://www.w3.org/2000/svg}"


def drawn(found: Subject) -> ET.Element:
    return ET.fromstring(svg(report(found), found.title))


def test_the_picture_has_every_tensor(folder: Path) -> None:
    found = subject(str(folder / "gemma3.gguf"), backends("cpu-exact"), "prefill", options=OPTIONS)
    root = drawn(found)
    tips = [r.findtext(f"{SVG}title") or "" for r in root.iter(f"{SVG}rect") if "life" in r.get("class", "")]
    lives = arenas_of(found.executable)[0].lives
    assert sorted(t.split("\n")[0] for t in tips) == sorted(x.name for x in lives)
    texts = [t.text or "" for t in root.iter(f"{SVG}text")]
    assert {"offset (KiB)", *KINDS} <= set(texts) and any(t.startswith("peak: ") for t in texts)
    assert any(t.startswith("Memory by step: gemma3.gguf") for t in texts) and {"6", "layer 6"} & set(texts)
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= 1400 and float(rect.get("height", 0)) > 0


@pytest.mark.parametrize(("nbytes", "unit"), [(900, "B"), (200 << 10, "KiB"), (3 << 20, "MiB"), (5 << 30, "GiB")])
def test_offsets_are_in_the_unit_that_they_have(nbytes: int, unit: str) -> None:
    life = Life(0, "x", "SQR", "cpu", 0, nbytes, 0, 1)
    arena = ArenaLives("cpu", nbytes, 1, (life,))
    step = Step("x", "SQR", "cpu", None)
    root = ET.fromstring(svg(MemoryReport((), (), (arena_report(arena),), (step, step)), "one"))
    texts = [t.text or "" for t in root.iter(f"{SVG}text")]
    assert f"offset ({unit})" in texts
    x = [float(t.text or 0) for t in root.iter(f"{SVG}text") if t.get("text-anchor") == "end" and t.get("x") == "74"]
    assert len(x) > 2 and 1 <= max(x) <= 1024, "numbers that one reads at a glance"


def test_the_step_that_takes_more_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["memory", str(folder / "llama.gguf"), "--backend", "cpu", "-c", "64", "-b", "32"]
    told = {}
    for phase in ("prefill", "decode"):
        assert cli.main([*argv, "--phase", phase, "--json"]) == 0
        told[phase] = json.loads(capsys.readouterr().out)
    sizes = {phase: sum(a["nbytes"] for a in found["arenas"]) for phase, found in told.items()}
    assert sizes["prefill"] > sizes["decode"]
    assert cli.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("other") == {"phase": "decode", "n_tokens": 1, "arena_nbytes": sizes["decode"]}
    assert found == told["prefill"]
    assert cli.main(argv) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert "prefill of 32 tokens" in first and second.startswith("decode of 1 token takes less: arenas of ")


def test_800_nodes_stay_readable() -> None:
    """No label where there is no room, and the small ones still show."""
    t = new_input("f32", 8, name="x")
    for i in range(800):
        t = ops.sqr(t, name=f"node_with_a_long_name_{i}")
    wide = ops.sum_rows(ops.repeat(t, 8, 4096), name="wide")
    root = drawn(Subject("many", "graph", 0, prepare(Graph(wide), get_backend("cpu"))))
    labels = [e for e in root.iter(f"{SVG}text") if (e.text or "").startswith("node_with")]
    assert labels == [] and len(list(root.iter(f"{SVG}rect"))) > 800
    assert all(float(r.get("width", 1)) >= 0.8 <= float(r.get("height", 1)) for r in root.iter(f"{SVG}rect"))


def test_names_are_no_markup(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.svg"
    assert cli.main(["memory", f"{folder / 'script.py'}:build", "--backend", "cpu", "--svg", str(out)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    tips = [t.text or "" for t in ET.fromstring(out.read_text(encoding="utf-8")).iter(f"{SVG}title")]
    assert any(t.startswith("</title>out\n") for t in tips) and any('a "<b>" \\x1b' in t for t in tips)


def test_a_graph_without_an_arena_and_one_with_faults_are_drawn() -> None:
    exe = doubled()
    for tensor in exe.arenas["cpu"].plan.offsets:
        exe.arenas["cpu"].plan.offsets[tensor] = 0
    told = report(Subject("wrong", "graph", 0, exe))
    assert told.wrong and 'class="wrong"' in svg(told, "wrong")
    assert "There is no compute arena" in svg(replace(told, arenas=()), "none")


def test_kinds_of_ops_are_known() -> None:
    from graphrt.op import registered_ops

    views = {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}
    others = {name for name in registered_ops() if kind_of(name) == "other"} - views
    sums = {"SUM_ROWS", "CROSS_ENTROPY_LOSS", "CROSS_ENTROPY_LOSS_BACK"}
    assert others == {*sums, "ARGMAX", "ARGSORT", "TOP_K", "SAMPLE", "SAMPLE_EACH", "PENALIZE"}
    assert [kind_of(op) for op in ("MUL_MAT+ADD", "RMS_NORM+MUL", "VIEW")] == ["matrix product", "norm", "other"]
    known = set(registered_ops()) | {"copy", "input"}
    assert {op for _, _, members in KINDS.values() for op in members} <= known
