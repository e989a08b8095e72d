"""gluon_emulator.py for launches whose programs wait for each other: each program a thread, on the same memory."""

from __future__ import annotations

import threading
from typing import Any

from support.gluon_emulator import Copies, Gl, Memory, Value, _counting, arguments_of, product, rebuilt

#: Seconds after which programs that still wait for each other are taken to hang.
PATIENCE = 60


class Together(Gl):
    """One program's view of the memory that all share: an atomic addition is one, and comes with all stores before."""

    def __init__(self, memory: Memory, warps: int, program: int, lock: threading.Lock, over: threading.Event) -> None:
        super().__init__(memory, warps)
        self.program = program
        self.lock = lock
        self.over = over

    def atomic_add(self, p: Value, n: int, sem: str, scope: str) -> Value:
        assert not self.over.is_set(), "another program failed"
        with self.lock:
            return super().atomic_add(p, n, sem, scope)


def emulate(launch: Any, late: bool = True, resident: int | None = None) -> None:
    """Runs a Launch of a Gluon kernel on tensors of the host. resident: programs that run at the same time, None for
    all; the next one starts when one of them ends, so that programs that wait for it never do: an AssertionError."""
    memory, lock, over = Memory(launch.args), threading.Lock(), threading.Event()
    room = threading.Semaphore(resident or launch.grid[0])
    failed = list[BaseException]()

    def run(program: int) -> None:
        with room:
            if over.is_set():
                return
            try:
                gl = Together(memory, launch.options["num_warps"], program, lock, over)
                copies = Copies(memory, late)
                nothing = {name: lambda *args: None for name in ("gdc_wait", "gdc_launch_dependents")}
                replaced = {"gl": gl, "async_copy": copies, "mma_v2": product, "range": _counting, **nothing}
                rebuilt(launch.kernel, replaced)(**arguments_of(launch, memory))
                assert not copies.open, "copies that nobody waits for"
            except BaseException as error:
                failed.append(error)
                over.set()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(launch.grid[0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        if thread.is_alive():
            over.set()
            failed.append(AssertionError("programs wait for one that does not run"))
    if failed:
        raise failed[0]
    memory.give_back()
