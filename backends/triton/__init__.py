"""The GPU backend: kernels in Triton. `TRITON_INTERPRET=1` runs the same kernels on the CPU, slowly, for tests."""

from graphrt.backends.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
