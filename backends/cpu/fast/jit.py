"""Compiles kernels on first use, keeps the machine code on disk, and packs their arguments."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import platform
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from graphrt import private_files
from graphrt.backends.cpu.fast.ir import Fn, Host
from graphrt.env import KERNEL_CACHE, cache_folder
from graphrt.presence import here

_DIGEST_BYTES = 32  # SHA-256 of the code that follows it in a file
_MOST_BYTES = 16 << 20  # of a file: the largest kernel has 31 KB

#: Machine code stays loaded as long as its engine lives.
_engines: list[Any] = []


@functools.cache
def host() -> Host:
    """This machine, as LLVM sees it. Sets LLVM up."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    return Host(llvm.get_default_triple(), llvm.get_host_cpu_name(), dict(features))


def _target_machine() -> Any:
    h = host()
    features = ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(h.features.items()))
    return llvm.Target.from_triple(h.triple).create_target_machine(cpu=h.cpu, features=features, opt=3, jit=True)


def cache_dir() -> Path | None:
    """Where machine code is kept: a folder that nobody else can write, made where it is missing, or None.

    GRAPHRT_KERNEL_CACHE names a folder for them alone, GRAPHRT_CACHE one for all that is kept; without either it is
    the user's cache. "0" keeps nothing on disk.
    """
    asked = KERNEL_CACHE.get() or cache_folder("kernels")
    return None if asked == "0" else private_files.cache_folder(asked, "kernels")


@functools.cache
def _sweep(folder: Path) -> None:
    """Deletes leftovers, once for a process."""
    private_files.sweep(folder)


@functools.cache
def _fingerprint() -> bytes:
    """All that machine code depends on beside the kernel's name: these sources, LLVM, the CPU."""
    digest = hashlib.sha256(repr((llvmlite.__version__, llvm.llvm_version_info, platform.python_version())).encode())
    h = host()
    digest.update(repr((h.triple, h.cpu, sorted(h.features.items()), h.byte_shuffles)).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


def _read(path: Path) -> bytes | None:
    """The machine code stored at `path`, or None when it is absent, damaged or can be another user's."""
    try:
        data = private_files.read(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        _say_unused(path.parent, private_files.reason(error))
        return None
    code = data[_DIGEST_BYTES:]
    if hashlib.sha256(code).digest() != data[:_DIGEST_BYTES]:
        _say_unused(path.parent, f"{path} is damaged: its checksum is another")
        return None
    return code


def _say_unused(folder: Path, reason: str) -> None:
    """One sentence for a folder, however many of its files are bad."""
    private_files.say_once(
        f"kernels in {folder}",
        f"kept machine code must be whole and yours alone: {reason}; it is compiled again, as are others like it",
    )


def _write(path: Path, code: bytes) -> None:
    with contextlib.suppress(OSError):  # a read-only home only costs compiling again
        private_files.write(path, hashlib.sha256(code).digest() + code)


def compile_ir(text: str) -> bytes:
    """LLVM IR -> an object file for this machine."""
    machine = _target_machine()
    module = llvm.parse_assembly(text)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes = llvm.create_new_function_pass_manager()
    # kernels are written as they are to run: these leave out what takes LLVM five times as long and changes nothing
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_new_gvn_pass()
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    return bytes(machine.emit_object(module))


def _path(name: str) -> Path | None:
    """Where a function's machine code is kept, None for nowhere."""
    folder = cache_dir()
    if folder is None:
        return None
    _sweep(folder)
    key = hashlib.sha256(_fingerprint() + name.encode()).hexdigest()[:24]
    return folder / f"{name}-{key}.o"


def _stored(name: str) -> bytes | None:
    path = _path(name)
    return _read(path) if path else None


def _compiled(name: str, text: str) -> bytes:
    """The machine code of LLVM IR, which is kept."""
    code, path = compile_ir(text), _path(name)
    if path:
        _write(path, code)
    return code


def load(name: str, make_ir: Callable[[], str]) -> int:
    """The address of function `name`: from the cache on disk, else compiled from `make_ir()`."""
    code = _stored(name)
    if code is None:
        with here.at_length():
            code = _compiled(name, make_ir())
    return _linked(name, code)


def load_kernels(kernels: Iterable[Kernel]) -> None:
    """Sees to it that kernels have their addresses. While LLVM compiles one, in a thread of its own, the next one's IR
    is written: the two take about as long."""
    missing = [kernel for kernel in dict.fromkeys(kernels) if not kernel.is_loaded]
    codes = {kernel: _stored(kernel.name) for kernel in missing}
    with contextlib.ExitStack() as stack:
        if None in codes.values():
            stack.enter_context(here.at_length())
            compiler = stack.enter_context(ThreadPoolExecutor(1, "graphrt-compile"))
            made = {k: compiler.submit(_compiled, k.name, k.ir()) for k, code in codes.items() if code is None}
            codes |= {kernel: code.result() for kernel, code in made.items()}
    for kernel, code in codes.items():
        assert code is not None
        vars(kernel)["address"] = _linked(kernel.name, code)


def _linked(name: str, code: bytes) -> int:
    """The address of function `name` in its object file."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    address = int(engine.get_function_address(name))
    assert address, f"{name} is not in its own object file"
    return address


@dataclass(frozen=True)
class Kernel:
    """A function to compile: its arguments and the code that writes its body.

    name: unique; it must spell out every static choice, because the cache on disk knows a kernel by it.
    ints: integer and address arguments; floats: float arguments; optional: those that may be left out (0).
    """

    name: str
    ints: tuple[str, ...]
    build: Callable[[Fn], None]
    floats: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def ir(self) -> str:
        f = Fn.kernel(self.name, self.ints, self.floats, host())
        self.build(f)
        return f.finish()

    @functools.cached_property
    def address(self) -> int:
        return load(self.name, self.ir)

    @property
    def is_loaded(self) -> bool:
        return "address" in vars(self)

    def pack(self, **values: float) -> ctypes.Array[ctypes.c_int64]:
        """The argument block: one 8-byte word each, in the order `ints + floats`."""
        missing = set(self.ints + self.floats) - values.keys() - set(self.optional)
        unknown = values.keys() - set(self.ints + self.floats)
        if missing or unknown:
            raise TypeError(f"{self.name} takes {self.ints + self.floats}; missing {missing}, unknown {unknown}")
        words = [struct.pack("=q", int(values.get(n, 0))) for n in self.ints]
        words += [struct.pack("=d", values.get(n, 0.0)) for n in self.floats]
        block = (ctypes.c_int64 * len(words))()
        ctypes.memmove(block, b"".join(words), 8 * len(words))
        return block
