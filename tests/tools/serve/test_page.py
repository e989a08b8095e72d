"""The page at /: its markdown and its streams, run by Node where there is one, against a real server; and the whole of
it in Chromium: the one that playwright has, or that GRAPHRT_CHROMIUM names."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.chromium import chromium
from support.served import Served
from support.soak import is_quiet

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

#: A page, and the bodies that it sends.
Talk = tuple[Any, list[dict[str, Any]]]


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


@pytest.fixture
def expect() -> Any:
    """Waits for what a page is to show; the page's own rules forbid code that is made of texts."""
    return pytest.importorskip("playwright.sync_api").expect


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def talk(browser: Any, served: Served) -> Iterator[Talk]:
    """The page in a browser, and the bodies that it sends. It must log nothing, and ask nobody but its server."""
    found, wrong, sent = browser.new_page(), list[str](), list[dict[str, Any]]()

    def asks(request: Any) -> None:
        if not request.url.startswith(served.url):
            wrong.append(request.url)
        elif request.post_data:
            sent.append(json.loads(request.post_data))

    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("console", lambda message: wrong.append(message.text))
    found.on("request", asks)
    found.goto(served.url)
    yield found, sent
    found.close()
    assert not [text for text in wrong if "400 (Bad Request)" not in text]  # which Chromium says of every refusal


def test_a_talk_in_a_browser(talk: Talk, served: Served, expect: Any) -> None:
    """Settings, a system prompt and the turns before go along; an answer is what the API answers."""
    page, sent = talk
    expect(page.locator("#name")).to_have_text(httpx2.get(f"{served.url}/v1/models").json()["data"][0]["id"])
    page.locator("summary").click()
    for name, value in (
        ("temperature", "0"),
        ("top_k", "30"),
        ("max_tokens", "12"),
        ("seed", "5"),
        ("system", "the sea"),
    ):
        page.locator(f"#{name}").fill(value)
    page.locator("#seed").press("Enter")
    assert page.url.rstrip("/") == served.url, "settings are a form that goes nowhere"
    page.locator("#said").fill("hello")
    page.locator("#said").press("Shift+Enter")
    page.locator("#said").press("Enter")
    expect(page.locator("#figures")).to_contain_text("12 tokens, ")
    expect(page.locator("#send")).to_have_text("Send")
    messages = [{"role": "system", "content": "the sea"}, {"role": "user", "content": "hello\n"}]
    body = {"messages": messages, "temperature": 0, "top_k": 30, "max_tokens": 12, "seed": 5}
    assert sent == [body | {"stream": True, "stream_options": {"include_usage": True}, "reasoning_format": "none"}]
    wanted = httpx2.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"]
    said = page.locator(".assistant").text_content()
    assert said.split() == wanted["content"].split() and said.strip()
    page.locator("#said").fill("the rain")
    page.locator("#send").click()
    expect(page.locator(".assistant")).to_have_count(2)
    expect(page.locator("#send")).to_have_text("Send")
    answer = {"role": "assistant", "content": wanted["content"]}
    assert sent[1]["messages"] == [*messages, answer, {"role": "user", "content": "the rain"}]
    page.locator("#clear").click()
    assert page.locator("article").count() == 0


def test_a_browser_stops_and_is_refused(talk: Talk, served: Served, expect: Any) -> None:
    """Stop ends the text on the server too; a refusal is shown, and its turn is forgotten."""
    page, sent = talk
    page.locator("#said").fill("hello the sea")
    page.locator("#send").click()
    expect(page.locator(".assistant")).not_to_be_empty()
    expect(page.locator("#send")).to_have_text("Stop")
    page.locator("#send").click()
    expect(page.locator("#send")).to_have_text("Send")
    with httpx2.Client(base_url=served.url, timeout=60) as http:
        end = time.monotonic() + 60
        while not is_quiet(http):
            assert time.monotonic() < end, "the text ends"
            time.sleep(0.05)
    assert page.locator(".error").count() == 0
    page.locator("summary").click()
    page.locator("#top_p").fill("7")
    page.locator("#said").fill("more")
    page.locator("#send").click()
    expect(page.locator(".error")).to_contain_text("top_p")
    page.locator("#top_p").fill("")
    page.locator("#max_tokens").fill("2")
    page.locator("#said").fill("again")
    page.locator("#send").click()
    expect(page.locator(".assistant")).to_have_count(3)
    expect(page.locator("#send")).to_have_text("Send")
    assert [m["content"] for m in sent[-1]["messages"] if m["role"] == "user"] == ["hello the sea", "again"]


def test_a_browser_shows_marked_text_and_no_html(browser: Any, served: Served) -> None:
    page = browser.new_page()
    page.goto(served.url)
    page.evaluate("text => shown(parsed(text), article('assistant', ''))", MARKDOWN)
    made = page.locator(".assistant")
    assert made.locator("h3").text_content() == "Title" and made.locator("strong em").text_content() == "and em"
    assert made.locator("a").get_attribute("href") == "https://x.y/z" and made.locator("img").count() == 0
    assert made.locator("pre code").text_content() == "<b>code</b>\n\n- no list"
    page.close()
