import json, sys
name = sys.argv[1]
try:
    d = json.load(sys.stdin)
except ValueError as e:
    print(f"{name:30} no answer: {e}"); raise SystemExit
for s in d["steps"]:
    a = s.get("server") or {}
    dev, host = (a.get(k, {}).get("p50", 0) * 1e3 for k in ("step_device_seconds", "step_host_seconds"))
    print(f"{name:30} {s['output_tokens_per_s']:8.0f} t/s  first {s['time_to_first_token_ms']['p50']:7.1f} / {s['time_to_first_token_ms']['p95']:7.1f} ms  token {s['per_token_ms']['p50']:6.2f} ms  errors {s['errors']}  {s['seconds']:.1f} s  step device {dev:.2f} host {host:.2f} prepared {a.get('steps_prepared')}")
