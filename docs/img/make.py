"""The pictures of README and docs/debugging.md, made anew: `python docs/img/make.py`, or `make pictures`.

They need the demo model (`graphrt pull smollm2-135m`). page.png is the page of `graphrt dump --format html` as
Chromium shows it: it takes the package playwright with its Chromium, or one that GRAPHRT_CHROMIUM names, and is left
out without.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
for path in (ROOT, ROOT / "tests"):  # tests/ has the backend with a planted bug that diff.svg is of
    sys.path.insert(0, str(path))

from graphrt.tools import cli  # noqa: E402

MODEL = "smollm2-135m"
WRONG = "support.broken_backends:WrongStrideIn12"
PROMPT = ("-p", "Why is the sky blue?", "-c", "256")
#: By file, the verb that draws it.
SVG = {
    "diff.svg": ("diff", MODEL, "-a", "cpu", "-b", WRONG, *PROMPT, "--resync"),
    "memory.svg": ("memory", MODEL, "--backend", "cpu", "-c", "256", "--phase", "prefill", "--tokens", "64"),
    "tiles.svg": (
        "explain", "--synthetic", "llama-8b:q4_k_m", "__fattn__-7", "--device", "h100", "--phase", "prefill",
        "--tokens", "20", "-d", "3000",
    ),
}  # fmt: skip
#: Pixels of the page, and the node whose details it shows.
WIDTH, HEIGHT, NODE = 1180, 640, "__fattn__-0"


def page() -> None:
    """page.png: the dump's page with a node picked."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("page.png is left out: there is no package playwright", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        html = Path(folder) / "dump.html"
        cli.main(["dump", MODEL, "--backend", "cpu", "--format", "html", "-o", str(html)])
        arguments = ["--no-sandbox", "--disable-gpu"]
        browser = driver.chromium.launch(executable_path=os.environ.get("GRAPHRT_CHROMIUM"), args=arguments)
        shown = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        shown.goto(html.as_uri())
        shown.locator(f'.row[title="{NODE}"]').click()
        shown.screenshot(path=HERE / "page.png")
        browser.close()


def main() -> None:
    for name, argv in SVG.items():
        cli.main([*argv, "--svg", str(HERE / name)])
    page()


if __name__ == "__main__":
    main()
