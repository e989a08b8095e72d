"""What a model ran on, and the ceilings that its speed is held against, measured in the same process."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrt.tools.bench.model import seconds

if TYPE_CHECKING:
    from graphrt.backend import Backend


@dataclass(frozen=True)
class Machine:
    """gb_per_s: bytes of memory moved; gflop_per_s: of a square product; report: for JSON; text: for a reader."""

    gb_per_s: float
    gflop_per_s: float
    report: dict[str, Any]
    text: str

    def best(self, other: Machine) -> Machine:
        """Of two measurements the one with the faster memory: other processes can only make a measurement slower."""
        return self if self.gb_per_s >= other.gb_per_s else other


def on_gpu(backend: Backend) -> bool:
    """The backend runs on a GPU of torch's."""
    import torch

    device = backend.device
    return device is not None and device.name.startswith("cuda") and torch.cuda.is_available()


def machine(backend: Backend) -> Machine:
    """Measures now: about a second."""
    return _gpu(backend) if on_gpu(backend) else cpu()


def _gpu(backend: Backend) -> Machine:
    """A copy of 2 GiB, read and written, and an f16 product of 8192^3."""
    from graphrt.tools.bench.timing import ceilings

    what, ceiling = versions(backend), ceilings(True)
    copy, product = ceiling.copy_gb_per_s, ceiling.tflop_per_s["f16"]
    return Machine(
        copy,
        1e3 * product,
        {**what, "copy_gb_per_s": copy, "f16_tflop_per_s": product},
        f"{what['device']}, driver {what['driver']}, torch {what['torch']}, triton {what['triton']}, "
        f"copies {copy / 1e3:.2f} TB/s, f16 products {product:.0f} TFLOP/s",
    )


def cpu() -> Machine:
    """Bytes/s of reading memory and FLOP/s of an f32 product, best of several."""
    import torch

    from graphrt.backends.cpu.products import dense

    memory, a = torch.ones(64 * 2**20), torch.ones(2048, 2048)
    read = 4e-9 * memory.numel() / min(seconds(memory.sum) for _ in range(5))
    product = 2e-9 * 2048**3 / min(seconds(lambda: dense(a, a)) for _ in range(5))
    name = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "CPU")
    threads = torch.get_num_threads()
    return Machine(
        read,
        product,
        {
            "cpu": name,
            "threads": threads,
            "torch": torch.__version__,
            "read_gb_per_s": read,
            "f32_gflop_per_s": product,
        },
        f"{name}, {threads} threads, torch {torch.__version__}, reads {read:.1f} GB/s, "
        f"f32 products {product:.0f} GFLOP/s",
    )


def _cpuinfo() -> list[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return file.readlines()
    except OSError:  # another system than Linux
        return []


def versions(backend: Backend) -> dict[str, str]:
    """The device, its driver, and the versions of what figures depend on."""
    import importlib.metadata

    import torch

    import graphrt

    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    device = backend.device
    title = device.description or device.name if device is not None else backend.id
    return {
        "device": title, "driver": _driver(), "torch": torch.__version__,
        "triton": triton, "graphrt": graphrt.__version__,
    }  # fmt: skip


def _driver() -> str:
    """The version of NVIDIA's driver, "none" where there is no sign of one."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        shown = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        if shown:
            return shown[0]
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except OSError:
        return "none"
    return found[1] if found else "unknown"
