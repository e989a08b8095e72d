"""The page of `graphrt dump --format html` in headless Chromium: needs Playwright, and its Chromium or one that
GRAPHRT_CHROMIUM names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chromium import chromium

from graphrt import get_backend
from graphrt.models import Model
from graphrt.models.engine import SessionOptions
from graphrt.models.synthetic import synthetic
from graphrt.tools.dump.html import page as html
from graphrt.tools.inspect.describe import GraphInfo, describe
from graphrt.tools.inspect.overlay import overlays


@pytest.fixture(scope="module")
def info() -> GraphInfo:
    """32 layers."""
    session = Model(synthetic("tiny:q4_0", 32), [get_backend("cpu", exact=False)]).session(SessionOptions(n_ctx=64))
    return describe(session.executable(1, 1), "tiny of 32 layers", "decode", 1)


@pytest.fixture(scope="module")
def file(info: GraphInfo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "time.json").write_text('{"Qcur-7": 2.5, "Kcur-7": 1}')
    path = folder / "graph.html"
    path.write_text(html(info, overlays(info, [folder / "time.json"])))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[Any]:
    """The page as it opens. It must log nothing, and ask for nothing but itself."""
    found = browser.new_page(viewport={"width": 1280, "height": 800})
    wrong: list[str] = []
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("console", lambda message: wrong.append(message.text))
    found.on("request", lambda request: wrong.append(request.url) if request.url != file.as_uri() else None)
    found.goto(file.as_uri())
    yield found
    found.close()
    assert not wrong


def test_an_unfolded_model_of_32_layers_opens(browser: Any, info: GraphInfo, file: Path) -> None:
    found = browser.new_page()
    found.goto(file.as_uri() + "#unfolded")
    rows = found.locator(".row").count()
    found.screenshot()
    found.close()
    assert rows == len(info.tensors)


def test_layers_fold_and_unfold(page: Any) -> None:
    row = page.locator('.row[title="Qcur-7"]')
    layer = page.locator("section > button", has_text="layer 7,")
    assert row.count() == 0 and "alike: 0-30" in layer.inner_text()
    layer.click()
    assert row.is_visible() and layer.get_attribute("aria-expanded") == "true"
    layer.click()
    assert not row.is_visible()
    page.click("#unfold")
    assert row.is_visible() and page.locator('.row[title="Qcur-31"]').is_visible()
    page.click("#fold")
    assert not page.locator(".row").first.is_visible()


def test_headings_stay_over_their_columns(page: Any) -> None:
    """At the top of the page and scrolled, where rows go under them; at widths where the header breaks into lines."""
    page.click("#unfold")
    for width in (1280, 700):
        page.set_viewport_size({"width": width, "height": 800})
        for scrolled in (0, 900):
            page.evaluate(f"window.scrollTo(0, {scrolled})")
            page.wait_for_timeout(50)
            head, header = page.locator("#head"), page.locator("header").bounding_box()
            box = head.bounding_box()
            if scrolled:
                assert box["y"] == pytest.approx(header["y"] + header["height"], abs=1)
            middle = (box["x"] + 100, box["y"] + box["height"] / 2)
            over = "([x, y]) => document.elementFromPoint(x, y).closest('#head') !== null"
            assert page.evaluate(over, middle), "no row is drawn over it"
            row = next(r for r in page.locator(".row").all() if r.bounding_box()["y"] > box["y"] + 40)
            columns = [[c.bounding_box() for c in r.locator("span").all()] for r in (head, row)]
            for title, cell in zip(*columns):
                assert (title and title["x"]) == (cell and cell["x"]), "a title over each column"
    page.select_option("#overlay", label="bytes")
    assert page.inner_text("#shown") == "bytes"


def test_numbers_are_the_dumps(page: Any, info: GraphInfo) -> None:
    for row in page.locator(".row").all()[:20]:
        number = int(row.locator(".number").inner_text())
        assert info.tensors[number].name == row.get_attribute("title")
    page.fill("#search", "#87")
    assert page.locator('.row[data-index="87"]').is_visible()


def test_search(page: Any) -> None:
    page.fill("#search", "mul_mat cur-7")
    visible = [r.get_attribute("title") for r in page.locator(".row").all() if r.is_visible()]
    assert visible == ["Qcur-7", "Kcur-7", "Vcur-7"] and page.inner_text("#found") == "3 found"
    page.fill("#search", "nothing like it")
    assert page.inner_text("#found") == "0 found" and not page.locator("section").first.is_visible()
    page.fill("#search", "")
    assert page.locator("section").first.is_visible() and page.inner_text("#found") == ""


def test_details_lead_to_sources_and_readers(page: Any) -> None:
    page.locator('.row[title="Qcur-0"]').click()
    details = page.inner_text("#details")
    assert "blk.0.attn_q.weight q4_0[256, 256]" in details and "MUL_MAT" in details and "compute" in details
    near = page.locator(".row.near").all()
    assert {row.get_attribute("title") for row in near} >= {"attn_norm-0", "blk.0.attn_q.weight"}
    page.fill("#search", "qcur-0")
    page.locator("#details button", has_text="attn_norm-0").click()
    assert page.locator("#details h1").inner_text() == "attn_norm-0"
    assert page.locator('.row.picked[title="attn_norm-0"]').is_visible(), "what is picked shows, found or not"


def test_keys_do_what_the_mouse_does(page: Any) -> None:
    page.locator('.row[title="Kcur-0"]').focus()
    page.keyboard.press("Enter")
    assert page.locator("#details h1").inner_text() == "Kcur-0"


def test_overlays(page: Any) -> None:
    assert page.locator("#overlay option").all_inner_texts() == ["time", "FLOP", "bytes"]
    page.locator("section > button", has_text="layer 7,").click()
    full, part = (page.locator(f'.row[title="{name}"]') for name in ("Qcur-7", "Kcur-7"))
    full.scroll_into_view_if_needed()
    assert full.locator(".value").inner_text() == "2.5" and part.locator(".value").inner_text() == "1"
    wide, narrow = (row.locator(".bar").bounding_box()["width"] for row in (full, part))
    assert narrow == pytest.approx(0.4 * wide, rel=0.05)
    page.select_option("#overlay", label="bytes")
    assert page.locator('.row[title="Qcur-7"] .value').inner_text().endswith("KiB")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_in_dark(page: Any, scheme: str) -> None:
    """WCAG's contrast of 4.5 between every text and what is behind it."""
    page.emulate_media(color_scheme=scheme)
    page.locator('.row[title="Qcur-0"]').click()
    colours = page.evaluate(
        """() => ["body", ".row", ".row.leaf", ".row.near", ".row.picked", "section > button", "section > button span",
                  "header p", "#details dt", "#details button"].map(selector => {
             let element = document.querySelector(selector), back = element;
             const own = getComputedStyle(element).color;
             while (getComputedStyle(back).backgroundColor === "rgba(0, 0, 0, 0)") back = back.parentElement;
             return [selector, own, getComputedStyle(back).backgroundColor]; })"""
    )
    for selector, text, back in colours:
        lighter, darker = sorted((_luminance(text), _luminance(back)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, f"{selector}: {text} on {back}"


def _luminance(colour: str) -> float:
    """Of a CSS colour `rgb(r, g, b)`, by WCAG 2's formula."""
    parts = [int(n) / 255 for n in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
