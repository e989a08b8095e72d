"""What compiled kernels do with memory, held against what they declare (backends/triton/accesses.py)."""

from __future__ import annotations

from graphrt.backends.triton.accesses import Declaration, declaration_of
from graphrt.backends.triton.launch import Launch
from support.ptx_accesses import early_in_ptx
from support.ttgir_accesses import CACHED, EARLY_READ, EARLY_WRITE, READ, WRITE, accesses_of


def differences(launch: Launch, ttgir: str, ptx: str = "") -> list[str]:
    """What a compiled launch does that its kernel doesn't declare, a sentence each. ptx: of an NVIDIA GPU."""
    declared, found = declaration_of(launch.kernel), accesses_of(ttgir)
    unknown = [text for text in found.unknown if not (declared.elsewhere and text.startswith("tt.store"))]
    said = [f"an access whose pointer is no argument's: {text}" for text in unknown]
    said += ["it lets the next launch go before it waits"] if found.lets_go_early and not declared.lets_go_early else []
    said += [] if found.waits == launch.waits else [f"it waits: {found.waits}, its constants say {launch.waits}"]
    # Without a wait all is early, and the launch begins when all before it has ended.
    parameter = {name: _parameter(name, launch) for name in found.args}
    done: dict[str, set[str]] = {name: set() for name in parameter.values()}
    for name, whats in found.args.items():
        done[parameter[name]] |= {w for w in whats if launch.waits or w in (READ, WRITE)}
    if launch.waits and ptx and "ttg.warp_specialize" not in ttgir:
        early = early_in_ptx(ptx, found.parameters)
        for what, names in ((EARLY_READ, early.reads), (EARLY_WRITE, early.writes), (CACHED, early.cached)):
            for name in names:
                done[parameter[name]].add(what)
    for name, whats in done.items():
        said += [] if name in declared.names else [f"{name} is not declared"]
        said += [f"{name}: {what}, which is not declared" for what in sorted(whats - _allowed(name, declared, launch))]
    return said


def _parameter(name: str, launch: Launch) -> str:
    """The kernel's parameter of a compiled argument. The fields of a named tuple are its name, the later ones with a
    number behind."""
    return name if name in launch.args else name.rpartition("_")[0]


def _allowed(name: str, declared: Declaration, launch: Launch) -> set[str]:
    """What a launch may do with an argument's memory."""
    needs = declared.early.get(name)
    early = needs is not None and (not needs or bool(launch.args[needs]))
    allowed = {READ} if name in declared.reads else set[str]()
    allowed |= {WRITE} if name in declared.writes else set()
    allowed |= {EARLY_READ} if early else set()
    return allowed | ({CACHED} if early and name not in declared.uncached else set())
