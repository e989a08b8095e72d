"""Two hosts on one machine: network namespaces of the test's own, with a link between them that may be slow or break.

    unshare -Urn python two_hosts.py LINK MODEL

starts torchrun on both, as two hosts have it, with a stage of a pipeline each. The link is two cables and a process
between them, which hands on what comes after a delay. LINK: "slow", every frame is late by some milliseconds; "broken",
the cables are pulled out in the middle of the text. Prints one line of JSON: for each host its exit code, after how
many seconds its rank had ended, counted from the break, and what it wrote.

    python two_hosts.py rank GIVEN ...

is what torchrun starts: `graphrt GIVEN ...`, with a watch whose looks are few, so that a test takes seconds.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

#: Seconds that a frame is late on a slow link; looks of the watch; seconds that anything may take at most, and
#: that torch's agent has to end by itself after its rank: over a broken link it waits for the other host's for minutes.
LATE, LOOKS, MOST = 0.01, 3, 60
AGENT = {"slow": 20, "broken": 2}
#: Linux's names of what Python's socket module lacks: frames come with the kernel's notes on checksums and sizes.
SOL_PACKET, PACKET_VNET_HDR = 263, 15
PORT = 29571
#: What both stages write together.
TEXT = ["--raw", "--temp", "0", "-p", "hello the sea", "-c", "256", "-t", "1", "--backend", "cpu"]


def tool(name: str) -> str:
    """A tool of the system, where it lies for root alone too."""
    places = [*os.environ["PATH"].split(os.pathsep), "/usr/sbin", "/sbin"]
    return next((str(Path(place, name)) for place in places if Path(place, name).exists()), "")


class Host:
    """A namespace, kept by a process that sleeps, at the other end of a cable whose near end is ours."""

    def __init__(self, number: int) -> None:
        self.cable, self.end, self.address = f"cable{number}", f"host{number}", f"10.77.0.{number}"
        self.keeper = subprocess.Popen(["unshare", "-n", "sleep", str(4 * MOST)])
        while os.readlink(f"/proc/{self.keeper.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        ip = tool("ip")
        peer = ["type", "veth", "peer", "name", self.end, "netns", str(self.keeper.pid)]
        subprocess.run([ip, "link", "add", "name", self.cable, *peer], check=True)
        subprocess.run([ip, "link", "set", self.cable, "up"], check=True)
        for words in (["addr", "add", f"{self.address}/24", "dev", self.end], ["link", "set", self.end, "up"],
                      ["link", "set", "lo", "up"]):  # fmt: skip
            subprocess.run([*self.inside(), ip, *words], check=True)

    def inside(self) -> list[str]:
        return ["nsenter", "-t", str(self.keeper.pid), "-n"]

    def torchrun(self, number: int, given: list[str], out: Any, err: Any) -> subprocess.Popen[bytes]:
        command = [
            *self.inside(), sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number),
            "--nproc-per-node", "1", "--master-addr", "10.77.0.1", "--master-port", str(PORT),
        ]  # fmt: skip
        env = {**os.environ, "GLOO_SOCKET_IFNAME": self.end, "TP_SOCKET_IFNAME": self.end}
        return subprocess.Popen([*command, __file__, "rank", *given], stdout=out, stderr=err, env=env)


def handed_on(source: socket.socket, target: socket.socket) -> None:
    """Frames from one cable to the other, each LATE after it came."""
    while True:
        try:
            frame = source.recv(1 << 17)
            time.sleep(max(0.0, LATE))
            target.send(frame)
        except OSError:  # a cable is out, or a frame is one that it does not take
            time.sleep(LATE)


def link(hosts: list[Host]) -> None:
    ends = []
    for host in hosts:
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        end.setsockopt(SOL_PACKET, 23, 1)  # PACKET_IGNORE_OUTGOING: what this process sends does not come back
        end.bind((host.cable, 0))
        ends.append(end)
    for pair in (ends, ends[::-1]):
        threading.Thread(target=handed_on, args=pair, daemon=True).start()


def has_children(job: subprocess.Popen[bytes]) -> bool:
    """torchrun's agent still has a rank."""
    try:
        return bool(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split())
    except OSError:
        return False


def main(how: str, model: str) -> None:
    hosts = [Host(1), Host(2)]
    link(hosts)
    given = ["run", model, *TEXT, "-n", "6" if how == "slow" else "-1", "--pp", "2"]
    outs, errors = ([tempfile.TemporaryFile() for _ in hosts] for _ in "ab")  # noqa: SIM115 (read until the end)
    jobs = [host.torchrun(i, given, outs[i], errors[i]) for i, host in enumerate(hosts)]
    start = time.monotonic()
    while not all(has_children(job) or job.poll() is not None for job in jobs):
        time.sleep(0.05)
    if how == "broken":
        while os.fstat(outs[0].fileno()).st_size < 20 and time.monotonic() < start + MOST:  # the first rank's text
            time.sleep(0.05)
        for host in hosts:
            subprocess.run([tool("ip"), "link", "set", host.cable, "down"], check=True)
    broken = time.monotonic()
    ends: list[float | None] = [None, None]
    while None in ends and time.monotonic() < broken + MOST:
        for i, job in enumerate(jobs):
            if ends[i] is None and not has_children(job):
                ends[i] = time.monotonic() - broken
        time.sleep(0.05)
    found = []
    for i, job in enumerate(jobs):
        try:
            code: int | None = job.wait(AGENT[how])
        except subprocess.TimeoutExpired:  # torch's agent, which waits for the other host's for minutes
            code = None
            job.kill()
        out, err = (os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace") for file in (outs[i], errors[i]))
        found.append({"code": code, "seconds": ends[i], "out": out, "err": err})
    for host in hosts:
        host.keeper.kill()
        host.keeper.wait()
    print(json.dumps(found))


def rank(given: list[str]) -> int:
    from graphrt import rank_watch
    from graphrt.tools.cli import main as graphrt

    rank_watch.SILENT = rank_watch.ABSENT = LOOKS
    return graphrt(given)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        sys.exit(rank(sys.argv[2:]))
    main(*sys.argv[1:])
