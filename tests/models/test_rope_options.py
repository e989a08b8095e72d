"""Rotation and context as asked for when a model is loaded, against files that say the same themselves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny, tiny_archs  # noqa: F401 (its models are found by name)
from support.verbs import Verb

from graphrt.errors import ArchError, SessionError
from graphrt.models import load
from graphrt.models.engine import OWN_CTX, SessionOptions, check_options
from graphrt.models.rope_options import RopeOptions

TOKENS = tiny.tokens(40)
SAME: list[tuple[RopeOptions, dict[str, Any]]] = [
    (RopeOptions(freq_base=500000.0), {"rope.freq_base": 500000.0}),
    (RopeOptions(freq_scale=0.25), {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    (
        RopeOptions(scaling="yarn", freq_scale=0.25, yarn_orig_ctx=64),
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    ),
    (
        RopeOptions(scaling="yarn", freq_scale=0.5, yarn_attn_factor=1.5, yarn_beta_fast=16.0, yarn_beta_slow=2.0),
        {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 1.5,
            "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.original_context_length": 256, "context_length": 512,
        },
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("m") / "m.gguf", "llama", tokenizer="spm")


@pytest.mark.parametrize(("options", "keys"), SAME)
def test_a_file_that_says_so_itself_gives_the_same(
    options: RopeOptions, keys: dict[str, Any], path: Path, tmp_path: Path
) -> None:
    saying = tiny.write_model(tmp_path / "m.gguf", "llama", tokenizer="spm", **keys)
    plain, found = load(path, "cpu"), load(path, "cpu", rope=options)
    wanted = load(saying, "cpu").logits(TOKENS)
    assert np.array_equal(found.logits(TOKENS), wanted)
    assert np.abs(plain.logits(TOKENS) - wanted).max() > 1e-3
    assert load(path, "cpu", rope=RopeOptions()).network.hp == plain.network.hp


def test_without_scaling(path: Path, tmp_path: Path) -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    stretched = tiny.write_model(tmp_path / "m.gguf", "llama", tokenizer="spm", **yarn)
    found = load(stretched, "cpu", rope=RopeOptions(scaling="none")).logits(TOKENS)
    assert np.array_equal(found, load(path, "cpu").logits(TOKENS))


def test_yarn_without_its_mix_is_linear_and_has_no_factor_of_size(path: Path) -> None:
    """As llama.cpp has it: the factor 0.1 ln(s) + 1 belongs to the mix."""
    linear = load(path, "cpu", rope=RopeOptions(scaling="linear", freq_scale=0.25)).logits(TOKENS)
    bare = RopeOptions(scaling="yarn", freq_scale=0.25, yarn_ext_factor=0.0)
    assert np.array_equal(load(path, "cpu", rope=bare).logits(TOKENS), linear)
    squeezed = RopeOptions(scaling="yarn", freq_scale=2.0, yarn_ext_factor=0.0)
    assert np.array_equal(
        load(path, "cpu", rope=squeezed).logits(TOKENS),
        load(path, "cpu", rope=RopeOptions(scaling="linear", freq_scale=2.0)).logits(TOKENS),
    )
    rope = load(path, "cpu", rope=RopeOptions(scaling="yarn", freq_scale=0.25)).network.hp.rope
    assert rope is not None and rope.ext_factor == 1.0
    net = rope.attn_factor * (1 + 0.1 * math.log(4))  # the op's own factor
    assert net == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_makes_the_context_longer(path: Path) -> None:
    model = load(path, "cpu", rope=RopeOptions(scaling="yarn", freq_scale=0.25, yarn_orig_ctx=100))
    assert model.network.hp.n_ctx_train == 400
    assert model.session(SessionOptions(OWN_CTX)).n_ctx == 400
    assert load(path, "cpu", rope=RopeOptions(freq_scale=0.25)).network.hp.n_ctx_train == 256, "as in llama.cpp"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"scaling": "longrope"}, "must be one of none, linear, yarn, got 'longrope'"),
        ({"freq_base": 0.0}, "freq_base must be a number from"),
        ({"freq_base": math.nan}, "freq_base must be a number from"),
        ({"freq_scale": -1.0}, "freq_scale must be a number from 1e-06 to 1000"),
        ({"freq_scale": math.inf}, "freq_scale must be"),
        ({"yarn_orig_ctx": 0}, "yarn_orig_ctx must be a number from 1 to"),
        ({"yarn_beta_fast": 0.0}, "yarn_beta_fast must be"),
        ({"yarn_attn_factor": "1"}, "yarn_attn_factor must be a number"),
    ],
)
def test_values_that_can_not_be(values: dict[str, Any], says: str) -> None:
    with pytest.raises(SessionError, match=says):
        RopeOptions(**values)


def test_models_that_can_not_be_changed(path: Path, tmp_path: Path) -> None:
    gpt2 = tiny.write_model(tmp_path / "gpt2.gguf", "gpt2")
    with pytest.raises(SessionError, match="gpt2 models have no rotation of positions to change; leave freq_base out"):
        load(gpt2, "cpu", rope=RopeOptions(freq_base=5e5))
    with pytest.raises(SessionError, match="yarn_beta_fast must go with the scaling yarn, this model's is linear"):
        load(path, "cpu", rope=RopeOptions(yarn_beta_fast=3.0))
    olmo = tiny.write_model(tmp_path / "s.gguf", "stablelm")
    assert load(olmo, "cpu", rope=RopeOptions(freq_base=5e5)).network.hp.rope is not None
    with pytest.raises(ArchError):
        load(tiny.write_model(tmp_path / "x.gguf", "llama", **{"rope.scaling.type": "odd"}), "cpu",
             rope=RopeOptions(freq_base=5e5))  # fmt: skip


# ---- context ----


def test_past_training_is_warned_of_and_works(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(path, "cpu")
    session = model.session(SessionOptions(300))
    assert "a context of 300 tokens is longer than the 256" in caplog.text and session.n_ctx == 300
    caplog.clear()
    assert np.isfinite(session.eval([1] * 299)).all()
    assert model.session(SessionOptions(OWN_CTX)).n_ctx == 256 and caplog.text == ""
    for name in ("gpt2", "mpt-full"):
        learned = load(tiny.write_model(tmp_path / f"{name}.gguf", name), "cpu")
        with pytest.raises(SessionError, match="must be 1 to 256, for which the model has positions, got 257"):
            learned.session(SessionOptions(257))
        if name == "gpt2":  # known by its keys, before there are weights
            with pytest.raises(SessionError, match="must be 1 to 256"):
                check_options(SessionOptions(257), learned.network.hp)
    alibi = load(tiny.write_model(tmp_path / "mpt.gguf", "mpt"), "cpu")
    assert alibi.session(SessionOptions(257)).n_ctx == 257


def test_the_flags(path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    graphrt = Verb(capsys)
    out, ids = tmp_path / "l.npy", ",".join(map(str, TOKENS))
    argv = ("logits", path, "--tokens", ids, "-o", out)
    flags = ("--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "64", "--rope-freq-base", "20000")
    assert graphrt(*argv, *flags).code == 0
    options = RopeOptions(scaling="yarn", freq_scale=0.25, yarn_orig_ctx=64, freq_base=20000.0)
    assert np.array_equal(np.load(out), load(path, "cpu", exact=True, rope=options).logits(TOKENS))
    twice = graphrt(*argv, "--rope-scale", "4", "--rope-freq-scale", "0.25")
    assert twice.code == 2 and "without --rope-freq-scale" in twice.err
    assert "must be one of none, linear, yarn" in graphrt(*argv, "--rope-scaling", "odd").err
    assert graphrt("info", path, "-c", "0", "--json").json()["needs"]["n_ctx"] == 256
    argv = ("run", path, "-p", "hello", "--raw", "-n", "2", "--json", "--temp", "0")
    assert graphrt(*argv, "-c", "0").code == graphrt(*argv, "-c", "300").code == 0
    assert graphrt("perplexity", path, "-f", tmp_path / "none", "-c", "0").code == 2
