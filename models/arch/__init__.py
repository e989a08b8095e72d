"""The architectures: one file a family, found by the name that GGUF files give."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from graphrt.errors import ArchError
from graphrt.printing import MOST, brief

if TYPE_CHECKING:
    from graphrt.models.arch.transformer import Transformer
    from graphrt.models.gguf import GGUFFile
    from graphrt.models.hparams import HParams

#: general.architecture -> module and class. A module is imported when a file asks for it.
ARCHITECTURES = {
    "llama": ("llama", "Llama"),
    "qwen2": ("qwen2", "Qwen2"),
    "qwen3": ("qwen3", "Qwen3"),
    "qwen3moe": ("qwen3moe", "Qwen3MoE"),
    "gemma": ("gemma", "Gemma"),
    "gemma2": ("gemma2", "Gemma2"),
    "gemma3": ("gemma3", "Gemma3"),
    "phi3": ("phi3", "Phi3"),
    "gpt2": ("gpt2", "GPT2"),
    "mpt": ("mpt", "MPT"),
    "bloom": ("bloom", "Bloom"),
    "refact": ("refact", "Refact"),
    "falcon": ("falcon", "Falcon"),
    "olmo2": ("olmo2", "Olmo2"),
    "command-r": ("command_r", "CommandR"),
    "starcoder2": ("starcoder2", "StarCoder2"),
    "stablelm": ("stablelm", "StableLM"),
    "gpt-oss": ("gpt_oss", "GptOss"),
    "deepseek2": ("deepseek2", "DeepSeek2"),
    "bert": ("bert", "Bert"),
    "nomic-bert": ("nomic_bert", "NomicBert"),
}


#: What families that people have files of would need, by the beginnings of their names.
MISSING = {
    "mixtures of experts of another kind": (
        *("qwen2moe", "deepseek", "olmoe", "phimoe", "dbrx", "grok", "arctic", "glm4moe"),
        *("bailingmoe", "granitemoe", "nomic-bert-moe", "minimax", "mixtral", "ernie4_5-moe", "hunyuan-moe", "llama4"),
    ),
    "state-space or other recurrent layers": (
        *("mamba", "jamba", "rwkv", "arwkv", "falcon-h1", "nemotron_h", "granitehybrid", "lfm2", "plamo2", "qwen3next"),
        *("qwen35", "kimi-linear"),
    ),
    "an encoder and a decoder in one": ("t5",),
    "positions in several dimensions, for images": ("qwen2vl", "qwen3vl", "clip", "cogvlm"),
}


def architecture(name: str) -> type[Transformer]:
    """The family of that name. Raises ArchError for an unknown one, with the nearest and what it would need."""
    if name not in ARCHITECTURES:
        close = difflib.get_close_matches(name[:MOST], ARCHITECTURES, 3, 0.4)
        nearest = f"; the nearest: {', '.join(close)}" if close else ""
        lacks = next((what for what, names in MISSING.items() if name.startswith(names)), "")
        needs = f"; it needs {lacks}, not implemented here" if lacks else ""
        raise ArchError(
            f"the architecture must be one of those below, the file says {brief(name)}{nearest}{needs}.\n"
            f"Listed: {', '.join(ARCHITECTURES)}.\n"
            f"Use a model of a listed one, or add models/arch/<family>.py"
        )
    module, cls = ARCHITECTURES[name]
    found: type[Transformer] = getattr(importlib.import_module(f"graphrt.models.arch.{module}"), cls)
    return found


def read_file(file: GGUFFile) -> HParams:
    """The hyperparameters of a file. Raises ArchError for one that is of no architecture here, or damaged."""
    from graphrt.models.hparams import Keys

    keys = Keys(file)
    return architecture(keys.arch).read(keys)
