"""python check.py URL OTHER NAME [COMPANY]: whether two servers give the same tokens, greedy, edited and drawn; with
COMPANY the other's while so many other texts are made beside them."""
import json, sys, threading, urllib.request

url, other, name = sys.argv[1:4]
company = int(sys.argv[4]) if len(sys.argv) > 4 else 0


def asked(where, prompt, n, **more):
    body = {"prompt": prompt, "n_predict": n, "return_tokens": True, "seed": 5, **more}
    request = urllib.request.Request(where + "/completion", json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=120))["tokens"]


ways = {
    "greedy": {"temperature": 0}, "never ending": {"temperature": 0, "ignore_eos": True},
    "drawn": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "ignore_eos": True},
    "penalties": {"temperature": 0, "frequency_penalty": 0.5, "ignore_eos": True},
}
prompts = [[7, 300, 11, 45], [20 + i * 3 for i in range(70)]]
beside = [threading.Thread(target=asked, args=(other, [9 + i, 5], 90), kwargs={"temperature": 0.8, "ignore_eos": True}) for i in range(max(0, company - 1))]
before = {(way, i): asked(url, prompt, 64, **how) for way, how in ways.items() for i, prompt in enumerate(prompts)}
for thread in beside:
    thread.start()
after = {(way, i): asked(other, prompt, 64, **how) for way, how in ways.items() for i, prompt in enumerate(prompts)}
for thread in beside:
    thread.join()
differ = {f"{way} {i}": next((j for j, (a, b) in enumerate(zip(before[way, i], after[way, i])) if a != b), min(map(len, (before[way, i], after[way, i])))) for way, i in before if before[way, i] != after[way, i]}
print(f"{name}: {'the same tokens of all ' + str(len(before)) + ' texts' if not differ else 'tokens differ, from which on: ' + str(differ)}", flush=True)
