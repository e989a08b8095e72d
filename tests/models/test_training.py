"""Fine-tuning: adapters in a model's graph, steps held against plain torch's in float64, what is refused and saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.tiny import tokens, write_model
from support.tiny_archs import DECODERS

from graphrt import get_backend
from graphrt.errors import SessionError
from graphrt.models.gguf import GGUFFile
from graphrt.models.model import Model
from graphrt.models.training.lora import LoraOptions, lora_of, values_of
from graphrt.models.training.trainer import AdamW, Trainer
from graphrt.ops.recompute import backward_order, peak_of, post_order
from graphrt.tools.bench.torch_lora import PlainLlama, why_not
from graphrt.tools.bench.training import flops, scattered

N = 10
#: With biases, parts of one matrix, experts, latent attention, a matrix that is also the embedding.
ARCHS = ("gemma2", "gpt2", "phi3", "qwen3moe", "deepseek2", "falcon")
IDS = np.array(tokens()[:N], np.int32)
LORA = LoraOptions(rank=3, alpha=5.0)
OPTIMIZER = AdamW(lr=1e-2, beta1=0.8, beta2=0.95, eps=1e-5, weight_decay=0.1)


def loaded(folder: Path, arch: str = "llama", kind: str = "F16") -> Model:
    return Model(GGUFFile.open(write_model(folder / "m.gguf", arch, kind)), [get_backend("cpu")])


@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
def test_steps_are_plain_torch_s(tmp_path: Path, kind: str) -> None:
    """Losses and adapters after each of four steps, with learning rates of their own."""
    torch = pytest.importorskip("torch")
    model = loaded(tmp_path, kind=kind)
    assert why_not(model) is None
    trainer = Trainer(model, N, lora=LORA, optimizer=OPTIMIZER, type_kv="f32")
    scattered(trainer.adapters)
    given = {x.weight.name: (values_of(x.a), values_of(x.b)) for x in trainer.adapters}
    theirs = PlainLlama(model, given, LORA, OPTIMIZER, "cpu", torch.float64)
    for step in range(1, 5):
        lr = 1e-2 / step
        theirs.optimizer.param_groups[0]["lr"] = lr
        assert trainer.step(IDS, lr=lr) == pytest.approx(theirs.step(IDS), rel=2e-6)
    for x in trainer.adapters:
        for ours, expected in zip((x.a, x.b), theirs.lora[x.weight.name]):
            np.testing.assert_allclose(values_of(ours), expected.detach().numpy(), atol=2e-5, rtol=1e-3)


def test_a_new_adapter_changes_nothing(tmp_path: Path) -> None:
    """b is 0, so the first loss is the model's own."""
    model = loaded(tmp_path)
    first = Trainer(model, N, lora=LORA, type_kv="f32").step(IDS)
    session_logits = model.session().eval_rows(list(IDS), 0)[:-1].astype(np.float64)
    shifted = session_logits - session_logits.max(-1, keepdims=True)
    own = (np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(N - 1), IDS[1:]]).mean()
    assert first == pytest.approx(own, rel=1e-3)


@pytest.mark.parametrize("arch", [name for name in ARCHS if name in DECODERS])
def test_other_architectures_learn_a_text_by_heart(tmp_path: Path, arch: str) -> None:
    trainer = Trainer(loaded(tmp_path, arch), N, lora=LORA, optimizer=AdamW(lr=2e-2))
    losses = [trainer.step(IDS) for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]


def test_some_layers_alone(tmp_path: Path) -> None:
    trainer = Trainer(loaded(tmp_path), N, lora=LoraOptions(rank=2, targets=("attn_q", "ffn_down")))
    assert {x.weight.name.split(".")[2] for x in trainer.adapters} == {"attn_q", "ffn_down"}
    assert {x.a.ne[:2] for x in trainer.adapters} == {(x.weight.ne[0], 2) for x in trainer.adapters}


def test_weights_leave_tokens_out(tmp_path: Path) -> None:
    """What does not count changes nothing, and the loss is the mean over what does."""
    model = loaded(tmp_path)
    weights = np.zeros(N, np.float32)
    weights[[3, 7]] = 1.0, 3.0
    each = []
    for place in (3, 7):
        alone = np.zeros(N, np.float32)
        alone[place] = 2.0
        each.append(Trainer(model, N, lora=LORA).step(IDS, weights=alone))
    both = Trainer(model, N, lora=LORA).step(IDS, weights=weights)
    assert both == pytest.approx((each[0] + 3 * each[1]) / 4, rel=1e-5)
    changed = np.array(IDS)
    changed[8:] = changed[8:] % 7 + 1
    assert Trainer(model, N, lora=LORA).step(changed, weights=weights) == pytest.approx(both, rel=1e-6)


def test_several_texts_a_step(tmp_path: Path) -> None:
    """The loss of two texts is the mean of theirs, and neither sees the other."""
    model, n = loaded(tmp_path), 5
    both = Trainer(model, n, lora=LORA, n_seq=2).step(IDS)
    each = [Trainer(model, n, lora=LORA).step(text) for text in (IDS[:n], IDS[n:])]
    assert both == pytest.approx(sum(each) / 2, rel=1e-5)


def test_recomputing_gives_the_same_steps(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    whole = Trainer(model, N, lora=LORA, optimizer=OPTIMIZER)
    nodes = post_order(whole.loss, *backward_order(whole.gradients))
    limit = int(0.9 * peak_of(nodes, [whole.loss, *whole.gradients]))
    again = Trainer(model, N, lora=LORA, optimizer=OPTIMIZER, recompute=limit)
    assert any(t.name.endswith("(again)") for t in again.graph.nodes)
    assert [again.step(IDS) for _ in range(3)] == [whole.step(IDS) for _ in range(3)]


def test_what_is_refused(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    trainer = Trainer(model, N, lora=LORA)
    refused = {
        "two tokens or more": lambda: Trainer(model, 1),
        "must be linear layers of the model, .*attn_q.*, got attn_z": lambda: Trainer(
            model, N, lora=LoraOptions(targets=("attn_z",))
        ),
        "rank must be 1 to 4096": lambda: LoraOptions(rank=0),
        "takes 10 tokens": lambda: trainer.step(IDS[:5]),
        "takes 10 tokens from 0": lambda: trainer.step(IDS - 10**6),
        "a weight from 0 on for each of 10": lambda: trainer.step(IDS, weights=[-1.0] * N),
        "that are all 0": lambda: trainer.step(IDS, weights=[1.0] + [0.0] * (N - 1)),
        "lora:RANK": lambda: lora_of("dora:3"),
    }
    for message, make in refused.items():
        with pytest.raises(SessionError, match=message):
            make()


def test_adapters_are_saved_as_llama_cpp_reads_them(tmp_path: Path) -> None:
    trainer = Trainer(loaded(tmp_path), N, lora=LORA, optimizer=OPTIMIZER)
    trainer.step(IDS)
    trainer.save(tmp_path / "adapter.gguf")
    with GGUFFile.open(tmp_path / "adapter.gguf") as file:
        assert file.metadata["general.type"] == "adapter" and file.metadata["adapter.type"] == "lora"
        assert file.metadata["adapter.lora.alpha"] == 5.0 and file.metadata["general.architecture"] == "llama"
        for x in trainer.adapters:
            for side, leaf in (("a", x.a), ("b", x.b)):
                name = f"{x.weight.name}.lora_{side}"
                assert tuple(file.tensors[name].ne) == leaf.ne[:2]
                found = np.asarray(file.data(name)).view(np.float32).reshape(values_of(leaf).shape)
                np.testing.assert_array_equal(found, values_of(leaf))
        assert values_of(trainer.adapters[0].b).any()


def test_the_work_of_a_step_is_counted(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    weights = sum(t.n_elements for t in model.weights.loaded.values() if t.n_dims == 2)
    products = 4 * (weights - model.decoder.token_embd.n_elements)
    assert products < flops(model, N) < 1.5 * products
