"""Servers of two ranks beside those of one, on BACKEND: the same tokens with adapters, guesses and kept prompts, checked
before anything is timed; then tokens a second of one text of an 8B's shape, without guesses and with prompt lookup."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import graphrt

TREE = Path(graphrt.__file__).resolve().parent
sys.path.insert(0, str(next(p for p in (TREE / "tests", TREE.parent / "tests") if (p / "support").is_dir())))

from support.adapters import write_adapter  # noqa: E402
from support.tiny import write_model  # noqa: E402

from graphrt.models import load  # noqa: E402

BACKEND, OUT = sys.argv[1], Path(sys.argv[2])
PROMPT = [5 + i % 50 for i in range(200)]
ADAPTED = [{}, {"lora": [{"id": 0, "scale": 1}]}, {"lora": [{"id": 0, "scale": -0.5}]}]


class Server:
    def __init__(self, *argv):
        command = [sys.executable, "-m", "graphrt", "serve", *map(str, argv), "--port", "0", "--backend", BACKEND]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log = []
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"served at (http://[0-9.:]+)", line)
            if found:
                self.url = found[1]
                return
        raise SystemExit(f"{argv}: the server ended: {''.join(self.log)}")

    def ask(self, path, body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        return json.loads(urllib.request.urlopen(request, timeout=200).read())

    def text(self, n=40, prompt=PROMPT, **more):
        found = self.ask("/v1/completions", {"prompt": prompt, "max_tokens": n, "temperature": 0, **more})
        return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    def guessed(self):
        lines = urllib.request.urlopen(self.url + "/metrics").read().decode().splitlines()
        return {k: float(next(x for x in lines if x.startswith(f"graphrt:spec_decode_num_{k}_tokens_total")).split()[1])
                for k in ("draft", "accepted")}  # fmt: skip

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.log += self.process.stderr.readlines()
        assert self.process.wait(120) == 0, "".join(self.log)


def checked():
    tiny, adapter = OUT / "tiny.gguf", OUT / "a.gguf"
    write_model(tiny, "llama", tokenizer="spm", context_length=4096)
    write_adapter(adapter, load(tiny, "cpu", exact=True))
    common = tiny, "-np", 3, "-c", 512, "--lora", adapter, "--lora-init-without-apply"
    wanted = None
    for how in ((), ("--tp", 2), ("--tp", 2, "--lookup", 4), ("--tp", 2, "-md", tiny), ("--pp", 2, "-md", tiny),
                ("--tp", 2, "--prompt-cache", OUT / "kept"), ("--tp", 2, "--prompt-cache", OUT / "kept")):  # fmt: skip
        server = Server(*common, *how)
        found = [server.text(**more) for more in ADAPTED]
        guessed = server.guessed()
        server.end()
        texts = [text for text, _ in found]
        wanted = wanted or texts
        same = sum(a == b for a, b in zip(texts, wanted))
        print(f"{how}: {same} of {len(texts)} texts are those of one rank, cached {[n for _, n in found]}, {guessed}")
        assert len(set(texts)) == len(texts), "adapters make other texts"
        if BACKEND == "cpu":
            assert same == len(texts)
        print("".join(line for line in server.log if "known" in line or "kept" in line), flush=True)
    assert [n for _, n in found] == [192] * 3, "the second server reads what the first one left"


def timed():
    rows = []
    for how in ((), ("--tp", 2), ("--tp", 2, "--lookup", 8)):
        server = Server("--synthetic", "llama-8b:q4_k_m", "-np", 1, "-c", 4096, *how)
        server.text(64, prompt="hello", ignore_eos=True)
        began = time.perf_counter()
        server.text(512, prompt="hello", ignore_eos=True)
        rows.append((" ".join(map(str, how)) or "one GPU", 512 / (time.perf_counter() - began), server.guessed()))
        server.end()
    return rows


checked()
rows = timed() if BACKEND != "cpu" else []
print("==== table")
print("all checks passed")
for how, speed, guessed in rows:
    print(f"{how:24} {speed:8.1f} tokens/s  {guessed}")
