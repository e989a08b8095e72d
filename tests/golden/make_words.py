"""Regenerates tests/golden/words.json with llama.cpp.

By hand: pip install llama-cpp-python, and python tests/golden/make_words.py

For each pre-tokenizer of tests/support/tiny_vocab.py, and for WordPiece with and without normalizing, the ids of each
text: with the tokens that the file puts around it, without special tokens in it.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support.tiny import _add  # noqa: E402
from support.tiny_vocab import PRE, TEXTS, wordpiece, words  # noqa: E402


def tokenized(path: Path, keys: dict[str, Any]) -> list[list[int]]:
    writer = gguf.GGUFWriter(str(path), "gpt2")
    for key, value in keys.items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model, keys["model"]
    vocab = llama_cpp.llama_model_get_vocab(model)
    room = (llama_cpp.llama_token * 1024)()
    found = []
    for text in TEXTS:
        data = text.encode()
        n = llama_cpp.llama_tokenize(vocab, data, len(data), room, len(room), True, False)
        found.append(list(room[:n]))
    return found


def main() -> None:
    llama_cpp.llama_backend_init()
    vocabularies = {pre: words() | {"pre": pre} for pre in PRE}
    cased = {"normalizer.lowercase": False}
    vocabularies |= {"bert": wordpiece(), "bert-cased": wordpiece() | cased}
    with tempfile.TemporaryDirectory() as folder:
        golden = {name: tokenized(Path(folder) / "v.gguf", keys) for name, keys in vocabularies.items()}
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(ids, separators=(',', ':'))}" for name, ids in golden.items())
    (HERE / "words.json").write_text("{" + rows + "}\n")


if __name__ == "__main__":
    main()
