"""Sizes that a file may give a model: many times those of any published one, and such that a small file takes little
memory and time. A file's own tensors bound their product with the embedding's width, not what a run makes of them."""

from __future__ import annotations

MAX_LAYERS = 160  # published models have up to 137; a step of more would take seconds to prepare and to run
MAX_EXPERTS = 1024  # llama.cpp's limit
MAX_USED = 64  # experts of a token; published models have up to 22
MAX_USED_IN_ALL = 2048  # in all layers together: each is a node of a graph; up to 752
MAX_HEADS = 1024  # of a layer; up to 232
MAX_HEAD_SIZE = 1024  # elements; up to 576
#: Elements of one token in any row of a layer: up to so many embeddings (published models: 4), and so many beside.
MAX_TIMES, MAX_BESIDE = 64, 4096
