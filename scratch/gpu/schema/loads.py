"""Loads on a running server: python loads.py URL WHAT...; each prints a line, and then the parts of the server's steps
(serve_parts.py, by the files $PARTS_ASK and $PARTS_TOLD). Closed loads begin with all users at once."""
import asyncio, os, sys, time
from graphrt.tools.bench.load import Ask, closed, opened, summary
from graphrt.tools.bench.load_client import Server
from graphrt.tools.bench.load_lengths import lengths_of

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 24}, "age": {"type": "integer"},
  "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 400}, "ok": {"type": "boolean"}},
  "required": ["name", "age", "tags", "ok"], "additionalProperties": False}
# No text of it ends within 400 strings: as long as free ones, which are asked not to end.
LONG = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 400}
DRAWN = {"top_k": 40, "top_p": 0.95, "min_p": 0.05}
# name: users, in:out, requests, warm-up requests, temperature, body
LOADS = {
    "dry": (3, "8:12", 3, 3, 0.8, DRAWN),
    "dry-schema": (3, "8:12", 3, 3, 0.8, DRAWN | {"json_schema": SCHEMA, "ignore_eos": False}),
    "one": (1, "128:128", 8, 2, 0.0, {}),
    "one-long": (1, "16:512", 2, 1, 0.0, {}),
    "free": (64, "128:192", 128, 64, 0.8, DRAWN),
    "schema": (64, "128:192", 128, 64, 0.8, DRAWN | {"json_schema": SCHEMA, "ignore_eos": False}),
    "schema-long": (64, "128:192", 128, 64, 0.8, DRAWN | {"json_schema": LONG, "ignore_eos": False}),
    "dry-long": (3, "8:40", 3, 3, 0.8, DRAWN | {"json_schema": LONG, "ignore_eos": False}),
    "greedy": (64, "128:256", 128, 64, 0.0, {}),
    "ttft": (50, "1000:200", 100, 50, 0.0, {}),
    "ttft-open": (12, "1000:200", 72, 12, 0.0, {}),
}
url, names = sys.argv[1], sys.argv[2:]
ASK, TOLD = os.environ.get("PARTS_ASK"), os.environ.get("PARTS_TOLD")


async def parts(marks=False):
    """The server's table since it was last asked. marks: the next one has the device's parts."""
    if not ASK:
        return ""
    if os.path.exists(TOLD):
        os.remove(TOLD)
    with open(ASK + ".new", "w") as file:
        file.write("marks" if marks else "")
    os.replace(ASK + ".new", ASK)
    for _ in range(60):
        await asyncio.sleep(0.05)
        if os.path.exists(TOLD):
            return open(TOLD).read()
    return "PARTS: no answer\n"


async def main():
    server = Server(url)
    served = (await server.get("/v1/models"))["data"][0]
    n_vocab = (served.get("meta") or {}).get("n_vocab") or 1000
    at = int(time.time()) % 100_000 * 1000
    for given in names:
        name = given.rstrip("+")  # with +: the device's parts too, which costs each step some microseconds
        users, lengths, n, warm, temp, body = LOADS[name]
        ask = Ask(served["id"], n_vocab, 0, temp, 0, body)
        bodies = [ask.body(at + i, each) for i, each in enumerate(lengths_of(lengths, warm + n, 0))]
        at += len(bodies)
        await closed(server, bodies[:warm], users, lambda n=1: None)
        await parts(name != given)
        if name == "ttft-open":
            answers = await opened(server, bodies[warm:], float(users), 0, lambda n=1: None)
        else:
            answers = await closed(server, bodies[warm:], users, lambda n=1: None)
        s = summary(answers)
        table = await parts()
        if not s.get("requests"):
            print(f"{given:13s} FAILED {s.get('first_error')}", flush=True); continue
        t, p = s["time_to_first_token_ms"], s["per_token_ms"]
        print(f"{given:13s} {users:3d} users {lengths:9s} {s['output_tokens_per_s']:8.0f} t/s   first token p50 {t['p50']:7.1f} p95 {t['p95']:7.1f}   a token p50 {p['p50']:6.3f}   made {s['output_tokens']} ({s['output_tokens'] / s['requests']:.1f} a text)   errors {s['errors']}", flush=True)
        print(table, end="", flush=True)

asyncio.run(main())
