"""`graphrt explain --program N`: one program of an attention's launch, against ggml's arithmetic and kernels; and
devices that have no name here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from support.attention_plans import Shape, causal, chosen_on, ran

pytest.importorskip("triton")

from graphrt.backends.triton import device
from graphrt.backends.triton.kernels.flash_attn import stream_k
from graphrt.backends.triton.kernels.flash_attn.ranges import longest_first
from graphrt.backends.triton.kernels.flash_attn.tile_plan import attention_plan, program_segments
from graphrt.backends.triton.kernels.flash_attn.walk import visits, walk_facts
from graphrt.errors import BackendError
from graphrt.ops import attention_loops
from graphrt.tools import cli
from graphrt.tools.explain.devices import DEVICES, device_of

interpreted = pytest.mark.skipif(not device.interpreting(), reason="needs Triton's interpreter")


# ---- a session of ggml's, beside ours ----


@dataclass(frozen=True)
class Session:
    """What ggml's debugger shows of a step of 7 tokens of a model with 14 heads on 2 KV heads of 64, over 256 cells, on
    a GPU of 46 multiprocessors: its kernel flash_attn_ext <64, 64, 8, 1>, that is heads of 64 and 64, 8 queries and 1
    head a tile."""

    queries_a_tile: int = 8
    heads_a_tile: int = 1
    tiles: int = 14
    blocks_a_multiprocessor: int = 2
    blocks: int = 92
    threads: int = 128
    keys_a_block: int = 128
    iter_k: int = 2
    gqa_ratio: int = 7


SESSION = Session()
ADA = device_of(None, "sm_89", 46)
STEP = Shape((64, 64), 7, 256, (14, 2))


def test_the_numbers_of_the_session_follow_from_its_shape() -> None:
    s = SESSION
    assert s.tiles == -(-STEP.n_q // s.queries_a_tile) * STEP.heads[0] // s.heads_a_tile
    assert s.blocks == ADA.sm_count * s.blocks_a_multiprocessor and s.iter_k == STEP.n_kv // s.keys_a_block
    assert s.gqa_ratio == STEP.heads[0] // STEP.heads[1] and s.threads == 4 * 32


def ggmls_walk(block: int, s: Session) -> list[tuple[int, int, int, bool, bool]]:
    """(tile, kb0_start, kb0_stop, needs_fixup, is_fixup) of a thread block, by what ggml's kernel does with its kbc."""
    units = s.iter_k * s.tiles
    kbc, kbc_stop = block * units // s.blocks, (block + 1) * units // s.blocks
    found = []
    while kbc < kbc_stop:
        kb0_start = kbc % s.iter_k
        kb0_stop = min(s.iter_k, kb0_start + kbc_stop - kbc)
        whole_end = kb0_stop == s.iter_k
        found.append((kbc // s.iter_k, kb0_start, kb0_stop, whole_end and kb0_start > 0, not whole_end))
        kbc += kb0_stop - kb0_start
    return found


@pytest.mark.parametrize("tiles", [14, 140])
def test_our_stream_k_over_ggmls_tiles_is_ggmls(tiles: int) -> None:
    """14 tiles: most of the 92 blocks have nothing; 140: ranges go over several tiles."""
    s = replace(SESSION, tiles=tiles)
    starts = stream_k.unit_starts([s.iter_k] * s.tiles)
    for block in range(s.blocks):
        ours = stream_k.segments("stream_k", block, starts, s.blocks)
        assert [(x.tile, x.start, x.stop, x.needs_fixup, x.is_fixup) for x in ours] == ggmls_walk(block, s)
    with_work = sum(bool(ggmls_walk(block, s)) for block in range(s.blocks))
    assert with_work == (28 if tiles == 14 else 92)


def test_what_we_do_with_the_same_step() -> None:
    """Beside ggml's 14 tiles, a head each, of which 7 read the same keys: 2 tiles of all 7 heads of a KV head."""
    chosen = chosen_on(STEP, ADA)
    t, s = chosen.tiling, SESSION
    assert (chosen.kernel, t.pack, t.n_tiles) == ("forward", s.gqa_ratio, 2)
    assert (t.block_m, STEP.n_q * t.pack) == (64, 49), "49 of 64 rows in use, 7 of 8 in each of ggml's tiles"
    assert (t.block_n, t.n_blocks) == (64, 4), "ggml has 128 keys a block, two blocks"
    assert chosen.config.warps * 32 == s.threads
    assert (chosen.choice.schedule, chosen.programs, chosen.choice.occupancy) == ("tile", 2, 1)
    assert "no split is more than 5 % better: no fixup" in chosen.choice.reasons
    forced = chosen_on(STEP, ADA, schedule="stream_k")
    plan = attention_plan(forced, ADA.sm_count, causal(7, 256, 249))
    walks = [visits(plan, i, causal(7, 256, 249)) for i in range(forced.programs)]
    assert forced.programs == 8, "not 92: no more programs than k-blocks"
    assert [(v.group, v.kbc, v.start, v.stop, v.slot) for (v,) in walks[:4]] == [
        (0, 0, 0, 1, 1), (0, 1, 1, 2, 3), (0, 2, 2, 3, 5), (0, 3, 3, 4, 6)
    ]  # fmt: skip
    assert [v.needs_fixup for (v,) in walks] == [False, False, False, True] * 2
    assert [v.is_fixup for (v,) in walks] == [True, True, True, False] * 2


# ---- what is told is what kernels do ----


@pytest.mark.parametrize("name", ["a100", "h100"])
@pytest.mark.parametrize("masked", [True, False])
def test_whole_tiles_are_taken_in_the_kernels_order(name: str, masked: bool) -> None:
    """Several sections of head groups, by the kernels' own formulas."""
    shape = Shape((128, 128), 1024, 65536, (32, 8), mask=(1, 1) if masked else None, n_seq=2)
    chosen = chosen_on(shape, name, schedule="tile")
    t, n_groups = chosen.tiling, chosen.tiling.n_groups * 2
    assert 1 <= chosen.section < n_groups, "one section proves nothing"
    blocks = (t.n_blocks,) * t.n_tiles
    ours = {i: [s.tile for s in mine] for i, mine in enumerate(program_segments(chosen, blocks))}
    n = chosen.programs
    for rank in range(t.n_tiles):
        if name == "a100":
            tile = longest_first.fn(rank, t.n_qt, chosen.section)
        else:  # hopper/work.py's tile()
            first = rank // (t.n_qt * chosen.section) * chosen.section
            width = min(chosen.section, n_groups - first)
            row, column = divmod(rank - first * t.n_qt, width)
            tile = (first + column) * t.n_qt + (t.n_qt - 1 - row if masked else row)
        turn, place = divmod(rank, n)
        assert ours[n - 1 - place if turn % 2 else place][turn] == tile


@interpreted
@pytest.mark.parametrize("case", ["causal", "a mask a head"])
def test_k_blocks_are_visited_in_the_lists_order(case: str) -> None:
    mask, args, plan = ran(case)
    t, done = plan.chosen.tiling, 0
    for program in range(args["programs"]):
        for v in visits(plan, program, mask):
            own = (v.sequence % args["m3"] * t.mask_groups + v.group % t.mask_groups) * t.n_qt + v.i_qt
            counts = args["p_counts"][2 * own : 2 * own + 2] if args["p_counts"].dim() == 1 else args["p_counts"][own]
            listed = args["p_blocks"].reshape(-1, t.n_blocks)[own]
            n_full, n_all = int(counts[0]), int(counts.sum())
            assert list(v.blocks) == listed[:n_all][v.start : v.stop].tolist()
            assert v.full == sum(v.start <= i < v.stop for i in range(n_full))
            done += len(v.blocks)
    assert done == sum(plan.k_blocks)


def test_every_query_and_head_is_in_one_tile() -> None:
    shape = Shape((64, 64), 40, 512, (12, 4), n_seq=2)
    chosen = chosen_on(shape, "a100", schedule="tile")
    plan = attention_plan(chosen, 108, None)
    seen = [
        (v.sequence, head, token)
        for i in range(chosen.programs) for v in visits(plan, i, None)
        for head in range(v.heads[0], v.heads[1] + 1) for token in range(v.tokens[0], v.tokens[1] + 1)
        if head // 3 == v.kv_head
    ]  # fmt: skip
    everything = {(s, h, q) for s in range(2) for h in range(12) for q in range(40)}
    assert set(seen) == everything
    extra = len(seen) - len(everything)  # a token whose heads two tiles share is named in both
    assert extra <= 3 * 4 * 2 * chosen.tiling.n_qt


# ---- in words ----


def test_a_hidden_tile_and_a_program_without_work() -> None:
    chosen = chosen_on(replace(STEP, n_kv=512), ADA, schedule="stream_k")
    hidden = np.full((1, 1, 7, 512), -np.inf, np.float16)
    plan = attention_plan(chosen, ADA.sm_count, hidden)
    words = ["\n".join(text for _, text in walk_facts(plan, i, hidden)) for i in range(chosen.programs)]
    assert sum("all k-blocks are hidden" in text for text in words) == chosen.tiling.n_tiles
    assert sum("it has no unit" in text for text in words) == chosen.programs - chosen.tiling.n_tiles > 0
    with pytest.raises(BackendError, match=f"must be one of 0 to {chosen.programs - 1}, got {chosen.programs}"):
        visits(plan, chosen.programs, hidden)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    def called(*argv: str) -> tuple[int, str, str]:
        code = cli.main(["explain", "script.py:build", *argv])
        out = capsys.readouterr()
        return code, out.out, out.err

    return called


SCRIPT = """
import graphrt
from graphrt import ops

def build():
    q = graphrt.new_input("f32", 64, 1, 8, name="q")
    k = graphrt.new_input("f16", 64, 4096, 2, name="k")
    return graphrt.Graph(ops.sqr(ops.flash_attn_ext(q, k, k, None, 0.125, name="attn"), name="square"))
"""
HERE = ("--arch", "sm_89", "--sm-count", "46", "--shared-memory", "99K")


def test_parameters_that_say_nothing_are_left_out(run: Run) -> None:
    (line,) = [line for line in run("attn", *HERE)[1].splitlines() if line.startswith("parameters")]
    assert "softcap 0" in line and "score" not in line


def test_a_program_in_words_and_numbers(run: Run) -> None:
    code, out, _ = run("attn", *HERE, "--program", "3")
    assert code == 0 and "planned for a GPU of 46 multiprocessors: sm_89, 99.0 KiB of shared memory" in out
    assert "; blockIdx.x in ggml" in out and "kb0_start" in out and "is_fixup true" in out
    _, text, _ = run("attn", *HERE, "--program", "3", "--json")
    (visit,) = json.loads(text)["walk"]["visits"]
    assert visit["ggml"]["kb0_start"] == visit["start"] and visit["ggml"]["is_fixup"] is visit["is_fixup"] is True
    assert f"kb0_start {visit['start']}, kb0_stop {visit['stop']}" in out and f"slot {visit['slot']} of" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--program", "1", *HERE], "a program is one of an attention's, got no NODE"),
        (["square", "--program", "1", *HERE], "needs an attention that the triton backend runs, square is SQR"),
        (["attn", "--program", "99", *HERE], "a program must be one of 0 to"),
        (["attn", "--sm-count", "46"], "needs --arch and --sm-count, got no --arch"),
        (["attn", "--arch", "sm_1", "--sm-count", "46"], "an architecture must be one of sm_80"),
        (["attn", *HERE[:-1], "48K"], "at least 64 KiB of shared memory, as kernels are configured for, got 49152"),
    ],
)  # fmt: skip
def test_what_it_refuses(run: Run, argv: list[str], said: str) -> None:
    code, out, err = run(*argv)
    assert code == 2 and said in err and out == ""


def test_a_named_device_that_is_changed_has_no_rates(run: Run) -> None:
    assert device_of("h100") is DEVICES["h100"] and device_of("h100", sm_count=132) is DEVICES["h100"]
    cut = device_of("h100", sm_count=66)
    assert (cut.arch, cut.sm_count, cut.shared_memory, cut.copy) == ("sm_90", 66, 232448, 0.0)
    assert device_of("h100", arch="sm_89").shared_memory == ADA.shared_memory == 101376
    _, out, _ = run("--device", "h100", "--sm-count", "66")
    assert "its rates are not known: no times" in out and "at the ceilings" not in out


# ---- loop orders ----


@pytest.mark.parametrize(("n_q", "n_kv", "rows", "keys"), [(20, 50, 8, 16), (1, 7, 4, 3), (32, 32, 32, 32)])
def test_both_loop_orders_are_attention_and_count_their_traffic(n_q: int, n_kv: int, rows: int, keys: int) -> None:
    rng, d, d_v = np.random.default_rng(0), 16, 12
    q, k, v = (rng.standard_normal(s) for s in ((n_q, d), (n_kv, d), (n_kv, d_v)))
    s = q @ k.T * 3.0  # weights far from equal
    weights = np.exp(s - s.max(1, keepdims=True))
    expected = weights @ v / weights.sum(1, keepdims=True)
    first, moved_1 = attention_loops.flash_attention_1(q, k, v, 3.0, rows, keys)
    second, moved_2 = attention_loops.flash_attention_2(q, k, v, 3.0, rows, keys)
    assert np.abs(first - expected).max() < 1e-13 and np.abs(second - expected).max() < 1e-13
    assert moved_1 == attention_loops.traffic_1(n_q, n_kv, d, d_v, keys)
    assert moved_2 == attention_loops.traffic_2(n_q, n_kv, d, d_v, rows)
    assert moved_2.written == n_q * d_v, "the result, once"


def test_the_rule_of_block_sizes() -> None:
    """FlashAttention's own example: 100 KB of half floats and heads of 64 give 200 keys and 64 rows."""
    assert attention_loops.block_sizes(51200, 64) == (64, 200)
    assert attention_loops.block_sizes(25344, 64) == (64, 99)
    assert attention_loops.block_sizes(1024, 128) == (2, 2) and attention_loops.block_sizes(10, 64) == (1, 1)
