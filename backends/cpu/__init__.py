"""The CPU backend, in torch: the reference that every other backend is held against, and a fast form of itself."""

from graphrt.backends.cpu import vector_functions  # noqa: F401  (makes MKL ready, before anything computes)
from graphrt.backends.cpu.backend import CpuBackend
from graphrt.backends.cpu.reference import evaluate

__all__ = ["CpuBackend", "evaluate"]
