"""The page at /: its markdown and its streams, run by Node where there is one, against a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.served import Served

import graphrt.tools.serve

PAGE = Path(graphrt.tools.serve.__file__).with_name("page.html")
MARKDOWN = """# Title
two **bold *and em***
lines with `a*b*`

- one
- [link](https://x.y/z) and [no](javascript:alert(1))

1. first
> said
> twice
```py
<b>code</b>

- no list
```
<img src=x onerror=alert(1)>"""


def node(code: str) -> Any:
    """What the code gives to say(), after the part of the page's script that needs no page."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("no Node to run the page's script")
    script = PAGE.read_text().partition("<script>")[2].partition("// ---- the page ----")[0]
    script += f"const say = (x) => console.log(JSON.stringify(x));\n(async () => {{ {code} }})();"
    done = subprocess.run([found, "-"], input=script, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_served_and_asks_nobody_else(served: Served, guarded: Served) -> None:
    for server in (served, guarded):
        answer = httpx2.get(server.url)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
        assert "connect-src 'self'" in answer.headers["content-security-policy"]
    text = PAGE.read_text()
    assert "http://" not in text and "https://" not in text and "innerHTML" not in text


def test_markdown_becomes_a_tree_and_never_html() -> None:
    tree = node(f"say(parsed({json.dumps(MARKDOWN)}));")
    assert tree == [
        ["h3", ["Title"]],
        ["p", ["two ", ["strong", ["bold ", ["em", ["and em"]]]], ["br", []], "lines with ", ["code", ["a*b*"]]]],
        ["ul", [["li", ["one"]], ["li", [["a", ["link"], "https://x.y/z"], " and [no](javascript:alert(1))"]]]],
        ["ol", [["li", ["first"]]]],
        ["blockquote", [["p", ["said", ["br", []], "twice"]]]],
        ["pre", [["code", ["<b>code</b>\n\n- no list"]]]],
        ["p", ["<img src=x onerror=alert(1)>"]],
    ]
    assert node('say(parsed("```\\nopen\\n**"));') == [["pre", [["code", ["open\n**"]]]]], "an answer is not whole yet"


def test_answers_come_in_pieces_and_can_be_stopped(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hello the sea"}], "max_tokens": 20, "temperature": 0}
    whole = httpx2.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
    url = json.dumps(f"{served.url}/v1/chat/completions")
    found = node(f"""
        const pieces = [];
        for await (const piece of answered({url}, {json.dumps(body)}, "")) pieces.push(piece);
        say(pieces);""")
    assert "".join(piece.get("text", "") for piece in found) == whole["choices"][0]["message"]["content"]
    assert len(found) > 3 and found[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": found[-1]["usage"]["prompt_tokens_details"]
    }
    stopped = node(f"""
        const stop = new AbortController(), pieces = [];
        try {{
          for await (const piece of answered({url}, {json.dumps(body | {"max_tokens": 4000})}, "", stop.signal)) {{
            pieces.push(piece);
            stop.abort();
          }}
        }} catch (error) {{ pieces.push(error.name); }}
        say(pieces);""")
    assert stopped[-1] == "AbortError" and len(stopped) < 100
    refused = node(f"""
        try {{
          for await (const _ of answered({url}, {{messages: []}}, "")) ;
        }} catch (error) {{ say(error.message); }}""")
    assert refused.startswith("messages")
