"""The page of the service in a real browser: with a keyboard alone, on a phone, with names that are markup."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import expect, sync_playwright

import kvtool
from kvtool.service import tenants
from kvtool.service.tenants import made
from kvtool.store.served import Served
from kvtool.store.store import Store
from tests.library import ids, renamed, tiny
from tests.service_running import HAVE_SERVICE, service

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MARKUP = "<img src=x onerror=document.title='broken'>"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"]
PROMPTS, CHUNK = 53, 64

pytestmark = pytest.mark.skipif(CHROMIUM is None or not HAVE_SERVICE, reason="chromium or the extra serve is not installed")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and token of a service with more prompts than a page shows, one of a model whose name is markup."""
    folder = tmp_path_factory.mktemp("page")
    tenant, token = made("ana")
    tenants.write(folder / "tenants.json", [tenant])
    model = tiny("qwen3")
    with (
        service(folder / "store", "--tenants", str(folder / "tenants.json")) as running,
        Store(Served(running.address, token), chunk=CHUNK) as store,
    ):
        for seed in range(PROMPTS - 1):
            store.put(kvtool.capture(model, ids(8, seed)), codec="raw")
        # A model's name is its maker's to choose.
        store.put(kvtool.capture(renamed(tiny("llama"), name=MARKUP), ids(2 * CHUNK)), codec="rvq-4,recent=8")
        yield running.address, token


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # A BLAS that is loaded in front of everything ends it.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, env=environment)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, filled: tuple[str, str]) -> Iterator[Any]:
    context = browser.new_context()
    opened = context.new_page()
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.goto(filled[0])
    yield opened
    context.close()
    assert not wrong, wrong


def test_with_a_keyboard_alone(page: Any, filled: tuple[str, str]) -> None:
    """Token, search, pages: no pointer is used; focus is where it is expected and can be seen."""
    page.wait_for_selector("#token")
    assert page.evaluate("document.activeElement.id") == "token"
    page.keyboard.type("kvt_wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#problem:not([hidden])")
    assert "not known" in page.text_content("#problem") and page.is_hidden("#inside")
    page.keyboard.type(filled[1])
    page.keyboard.press("Enter")
    expect(page.locator("#count")).to_have_text(f"1 to 50 of {PROMPTS}")
    assert page.text_content("#who") == "ana" and page.is_hidden("#login") and page.evaluate("location.href").rstrip("/") == filled[0]
    page.focus("#q")
    page.keyboard.type("rvq")
    page.keyboard.press("Enter")
    expect(page.locator("#count")).to_have_text("1 to 1 of 1")
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    page.keyboard.press("Enter")
    expect(page.locator("#count")).to_have_text(f"1 to 50 of {PROMPTS}")
    order = [page.evaluate("document.activeElement.id")]
    for _ in range(4):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert order == ["q", "chunks", "", "after", "again"]
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#count")).to_have_text(f"51 to {PROMPTS} of {PROMPTS}")


def test_what_it_shows(page: Any, filled: tuple[str, str]) -> None:
    page.fill("#token", filled[1])
    page.click("#login button")
    page.wait_for_selector("#figures dd")  # asked for at once with the entries: either may come first
    page.wait_for_selector("#list tbody tr")
    figures = dict(zip(page.locator("#figures dt").all_text_contents(), page.locator("#figures dd").all_text_contents(), strict=True))
    assert figures["Prompts"] == str(PROMPTS) and figures["Chunks"] == "2" and {"Hits", "Misses", "Evicted"} <= set(figures)
    page.fill("#q", "onerror")
    page.click("#search button")
    expect(page.locator("#count")).to_have_text("1 to 1 of 1")
    cells = page.locator("#list tbody td").all_text_contents()
    assert cells[1] == MARKUP and cells[2] == "rvq-4" and cells[3] == f"{CHUNK} to {2 * CHUNK}"
    assert re.search(r"k relative error 0\.00\d+", cells[5]), cells[5]
    assert page.locator("#list img").count() == page.locator("#models img").count() == 0 and page.title() == "kvtool: prompt caches"
    page.check("#chunks")
    expect(page.locator("#count")).to_have_text("1 to 3 of 3")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(browser: Any, filled: tuple[str, str], tmp_path: Path, scheme: str) -> None:
    """Nothing is cut off at 360 pixels, what is touched is large enough, and text stands out from its ground in both schemes."""
    context = browser.new_context(viewport={"width": 360, "height": 740}, device_scale_factor=2, has_touch=True, color_scheme=scheme)
    page = context.new_page()
    page.goto(filled[0])
    page.fill("#token", filled[1])
    page.tap("#login button")
    page.wait_for_selector("#figures dd")
    page.wait_for_selector("#list tbody tr")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for box in page.evaluate(
        "[...document.querySelectorAll('button, input[type=search]')].map(e => e.getBoundingClientRect().height).filter(h => h)"
    ):
        assert box >= 44
    for selector in ("#list td", "#figures dt", "#count", "#again"):
        assert contrast(page, selector) >= 4.5, selector
    context.close()


def contrast(page: Any, selector: str) -> float:
    """Of an element's text with what is behind it (WCAG 2)."""
    colours = page.evaluate(
        """selector => {
          let node = document.querySelector(selector);
          const text = getComputedStyle(node).color;
          while (node && getComputedStyle(node).backgroundColor === 'rgba(0, 0, 0, 0)') node = node.parentElement;
          return [text, getComputedStyle(node || document.body).backgroundColor];
        }""",
        selector,
    )

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted(map(luminance, colours))
    return (light + 0.05) / (dark + 0.05)
