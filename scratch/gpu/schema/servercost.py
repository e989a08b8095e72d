"""python servercost.py free|schema|greedy [users]: a server over the made-up device, in this process, clients in another."""
import sys, time, threading, subprocess, json, os
sys.path.insert(0, __file__.rsplit("/", 1)[0])
what, users = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 64
read = float(sys.argv[3]) if len(sys.argv) > 3 else 4.6e-3
per = int(sys.argv[4]) if len(sys.argv) > 4 else 3
import fake_device
fake_device.install(read=read)
from graphrt.tools.verbs import serve
import argparse
from graphrt.tools.serve import worker as wm
steps = {"n": 0, "cpu": 0.0, "wall": 0.0, "t": 0.0}
orig = wm.Worker._turn
def turn(self, *a):
    c, t = time.thread_time(), time.perf_counter(); f = fake_device.state["fake"]
    orig(self, *a)
    ts = self.scheduler.times
    if ts:
        steps["n"] += 1; steps["cpu"] += time.thread_time() - c - fake_device.state["fake"] + f; steps["wall"] += time.perf_counter() - t
        steps["waited"] = steps.get("waited", 0) + sum(x.waited for x in ts)
wm.Worker._turn = turn
loop = {"n": 0}
od = wm.Worker._deliver
def deliver(self, *a):
    loop.setdefault("cpu0", time.thread_time()); loop["n"] += 1
    od(self, *a)
    loop["cpu1"] = time.thread_time(); 
wm.Worker._deliver = deliver
parser = argparse.ArgumentParser(); serve.add_arguments(parser)
args = parser.parse_args(["--synthetic", "tiny-wide", "--port", "0", "-np", "256", "-c", "5120", "-b", "2048", "--no-warmup", "--backend", "cpu", "--max-total-tokens", "400000"])
S = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 24}, "age": {"type": "integer"},
  "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 400}, "ok": {"type": "boolean"}},
  "required": ["name", "age", "tags", "ok"], "additionalProperties": False}
import socket
listening = serve.listen("127.0.0.1", 0); args.listening = listening
port = listening.getsockname()[1]
def clients():
    body = {} if what == "greedy" else {"top_k": 40, "top_p": 0.95}
    if what == "schema": body["json_schema"] = S; 
    cmd = [sys.executable, "-m", "graphrt", "bench", "serve", f"http://127.0.0.1:{port}", "--users", str(users), "--lengths", "128:192" if users > 1 else "128:400", "--requests", str(per * users),
           "--temp", "0" if what == "greedy" else "0.8", "--body", json.dumps(body), "--json"]
    if what == "schema": cmd = [sys.executable, __file__.rsplit("/",1)[0] + "/schema_client.py", f"http://127.0.0.1:{port}", str(users), str(per * users), json.dumps(S)]
    t = time.process_time(); 
    out = subprocess.run(cmd, capture_output=True, text=True)
    try:
        r = json.loads(out.stdout)["steps"][0]
        print(f"{what} {users} users: {r['output_tokens_per_s']:.0f} t/s, first token p50 {r['time_to_first_token_ms']['p50']:.1f}, a token {r['per_token_ms']['p50']:.2f} ms")
    except Exception as e:
        print("client:", out.stdout[-800:], out.stderr[-1500:])
    n = steps["n"]
    total = time.process_time() - start_cpu
    print(f"  steps {n}: worker CPU {steps['cpu']/n*1e3:.2f} ms, all of the process {total/n*1e3:.2f} (others {(total-steps['cpu']-fake_device.state['fake'])/n*1e3:.2f}), loop CPU {(loop['cpu1']-loop['cpu0'])/n*1e3:.2f} ms, turn wall {steps['wall']/n*1e3:.2f}, waits {steps['waited']/n*1e3:.2f}")
    os._exit(0)
start_cpu = time.process_time()
threading.Thread(target=clients, daemon=True).start()
serve.serve(args)
