"""A load's JSON from stdin as a line, and noted in a file with what the server guessed; --table FILE: medians."""
import json, re, statistics, sys, urllib.request


def metrics(url):
    text = urllib.request.urlopen(url + "/metrics", timeout=10).read().decode()
    found = {name: float(value) for name, value in re.findall(r"^graphrt:(\w+?)(?:\{[^}]*\})? ([-+.e\d]+)$", text, re.M)}
    return {name: value for name, value in found.items() if "guess" in name or "accept" in name or "draft" in name}


def table(path):
    rows = [json.loads(line) for line in open(path)]
    kinds = list(dict.fromkeys((row["label"], row["name"]) for row in rows))
    first = {}
    for label, name in kinds:
        some = [row for row in rows if (row["label"], row["name"]) == (label, name)]
        rate, token = (statistics.median(row[key] for row in some) for key in ("rate", "token"))
        base = first.setdefault(label, rate)
        print(f"{label:12s} {name:8s} {rate:9.1f} t/s  {100 * (rate / base - 1):+6.1f} %  {rate / base:5.2f} x   a token p50 {token:7.3f} ms   first p50 {statistics.median(r['first'] for r in some):7.1f} ms   of {[round(r['rate']) for r in some]}")


if sys.argv[1] == "--table":
    table(sys.argv[2])
else:
    label, name, url, path = sys.argv[1:]
    try:
        step = json.load(sys.stdin)["steps"][0]
        row = {"label": label, "name": name, "rate": step["output_tokens_per_s"], "token": step["per_token_ms"]["p50"],
               "first": step["time_to_first_token_ms"]["p50"], "errors": step["errors"], "guesses": metrics(url)}
        server = step.get("server", {})
        row["parts"] = {k: round(1e3 * v["sum"] / v["n"], 3) for k, v in server.items() if isinstance(v, dict) and k.endswith("_seconds")}
    except (ValueError, KeyError, IndexError, OSError) as error:
        print(f"{label} {name} FAILED {error!r}"); sys.exit()
    open(path, "a").write(json.dumps(row) + "\n")
    print(f"{label:12s} {name:8s} {row['rate']:9.1f} t/s   a token p50 {row['token']:7.3f}   first p50 {row['first']:7.1f}   errors {row['errors']}   {row['guesses']}   ms {row['parts']}")
