"""A report works in a real browser: without a network, at two widths, in both colour schemes, by mouse and keyboard.

Needs playwright and Debian's Chromium; ``pytest -m browser`` fails where one of them is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

import memo_sim as memo
from tests.cli.commands import memo_sim

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

CHROMIUM = "/usr/bin/chromium"
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
GUTTER = {1600: 128, 400: 64}
"""Pixels left of the timeline, by the window's width."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", *QUIET])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plan of one stage, and one of two stages with several micro-batches."""
    folder = tmp_path_factory.mktemp("reports")
    common = ("what-if", "gpt-7b", "--cluster", "a800-1x8", "--system", "memo", "--seq-len", "64k", "--top", "3")
    stages = ("--tp", "4", "--pp", "2", "--cp", "1", "--global-batch", "4", "--system", "every-layout")
    one = memo_sim(*common, "--tp", "8", "--report", "one.html", cwd=folder)
    two = memo_sim(*common[:4], *common[6:], *stages, "--report", "two.html", cwd=folder)
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    return {"one": folder / "one.html", "two": folder / "two.html"}


@pytest.fixture(scope="module")
def other_pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of questions that have tables of their own before a plan's page, or no plan."""
    folder = tmp_path_factory.mktemp("pages")
    memo.gpus("gpt-7b", seq_len="64k", cluster=["a800", "h100"], most_gpus=16, tp=8, recompute="full").save_report(
        folder / "gpus.html"
    )
    memo.what_if("gpt-7b", cluster=["a800-1x8", "h100-1x8"], seq_len="64k", tp=8).save_report(folder / "clusters.html")
    memo.longest("gpt-tiny", cluster="a800-1x2", step="4k", tp=2, recompute="full").save_report(folder / "longest.html")
    memo.oom("gpt-7b", cluster="a800-1x8", seq_len="256k", tp=8, recompute="none", alpha=0).save_report(
        folder / "oom.html"
    )
    return {path.stem: path for path in folder.iterdir()}


class Opened:
    """A page in a browser that has no network, with everything that it complained about."""

    def __init__(self, browser: Browser, path: Path, width: int, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        if "oom" in path.name:  # it has no step
            return
        self.page.wait_for_selector(".timeline[data-ready=yes]", timeout=20_000)
        self.plot = self.page.locator(".timeline .plot")
        self.plot.scroll_into_view_if_needed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    @property
    def view(self) -> tuple[float, float]:
        """The part of the step that is shown, in seconds."""
        shown = "(element) => [Number(element.dataset.from), Number(element.dataset.to)]"
        begin, end = self.page.locator(".timeline").evaluate(shown)
        return begin, end

    def hover(self, share: float, down: float) -> str:
        """Move the mouse to a share of the step's time and ``down`` pixels; return what the page says there."""
        box = self.plot.bounding_box()
        assert box is not None
        gutter = GUTTER[self.page.viewport_size["width"]]
        self.page.mouse.move(box["x"] + gutter + share * (box["width"] - gutter - 8), box["y"] + down)
        tip = self.page.locator(".tip")
        return tip.inner_text() if tip.is_visible() else ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("name", ["one", "two"])
def test_a_page_opens_without_a_network_or_an_error(browser, reports, name, width, scheme) -> None:
    with Opened(browser, reports[name], width, scheme) as opened:
        assert opened.complaints == []
        assert opened.requests == [reports[name].as_uri()]
        assert opened.page.evaluate("document.documentElement.scrollWidth") == width
        begin, end = opened.view
        assert begin == 0 < end
        ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
        drawn = "(canvas) => new Set(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data).size"
        assert opened.plot.locator("canvas").first.evaluate(drawn) > 20


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("name", ["gpus", "clusters", "longest", "oom"])
def test_pages_of_other_questions_open_too(browser, other_pages, name, width) -> None:
    with Opened(browser, other_pages[name], width) as opened:
        assert opened.complaints == []
        assert opened.requests == [other_pages[name].as_uri()]
        assert opened.page.evaluate("document.documentElement.scrollWidth") == width
        assert opened.page.locator("h1").count() == 1


def test_keys_buttons_mouse_and_wheel_change_the_view(browser, reports) -> None:
    with Opened(browser, reports["one"], 1600) as opened:
        _, whole = opened.view
        opened.plot.focus()
        opened.plot.press("+")
        begin, end = opened.view
        assert end - begin == pytest.approx(whole / 1.6)
        opened.plot.press("ArrowRight")
        assert opened.view[0] > begin
        opened.plot.press("0")
        assert opened.view == (0, whole)
        opened.page.get_by_role("button", name="Zoom in").click()
        assert opened.view[1] < whole
        opened.page.get_by_role("button", name="Whole step").click()
        opened.hover(0.25, 40)
        opened.page.mouse.down()
        opened.hover(0.5, 40)
        opened.page.mouse.up()
        begin, end = opened.view
        assert (begin, end) == (pytest.approx(whole / 4, rel=0.01), pytest.approx(whole / 2, rel=0.01))
        opened.page.keyboard.down("Control")
        opened.page.mouse.wheel(0, 200)
        opened.page.keyboard.up("Control")
        opened.page.wait_for_function(f"Number(document.querySelector('.timeline').dataset.to) > {end}")
        assert opened.complaints == []


@pytest.mark.parametrize("width", [400, 1600])
def test_hover_names_the_instruction_and_the_live_memory(browser, reports, width) -> None:
    with Opened(browser, reports["one"], width) as opened:
        instruction = opened.hover(0.3, 38)
        assert "on lane compute" in instruction
        assert "m0/s0/l" in instruction
        height = opened.plot.bounding_box()["height"]
        memory = [text for down in range(40, int(height), 12) if "largest of" in (text := opened.hover(0.3, down))]
        assert memory
        assert "GiB" in memory[0]
        assert "state" in memory[0]
        assert opened.complaints == []


def test_all_stages_are_shown_and_each_one_s_memory(browser, reports) -> None:
    with Opened(browser, reports["two"], 1600) as opened:
        assert "stage 1" in opened.page.locator(".choices select").inner_text()
        for stage, down in ((1, 44), (2, 260)):
            found = [text for d in range(down, down + 240, 6) if f"stage {stage}" in (text := opened.hover(0.6, d))]
            assert found, stage
        opened.page.locator(".choices select").select_option(label="stage 2 · rank 4")
        opened.page.locator(".choices input").uncheck()
        assert opened.complaints == []
