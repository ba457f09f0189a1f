"""What a reader sees of the page: nothing cut, clipped or struck through; hover, filter, print."""

import pytest

from tests.e2e.browser import A4_WIDTH, CONTRAST, LAYOUT, browser_pages, find_chromium, unfold

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no chromium, chromium-browser or google-chrome on this machine"
)
WHOLE = {"cut": [], "gaps": [], "clipped": [], "overlapping": [], "struck": []}


@pytest.fixture(scope="module")
def report(page, tmp_path_factory):
    """The report as a file."""
    path = tmp_path_factory.mktemp("look") / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def open_page():
    """One browser for all tests of this module."""
    with browser_pages() as opened:
        yield opened


@pytest.mark.parametrize("width", [1280, 768, 390])
def test_nothing_is_cut_clipped_or_struck_through(width, open_page, report):
    errors: list[str] = []
    seen = open_page(report, width=width)
    seen.on("console", lambda message: errors.append(message.text))
    seen.on("pageerror", lambda error: errors.append(str(error)))
    seen.reload()
    unfold(seen)
    assert seen.evaluate("document.scrollingElement.scrollWidth") <= width
    assert seen.evaluate(LAYOUT) == WHOLE
    for scheme in ("light", "dark"):
        seen.emulate_media(color_scheme=scheme)
        assert min(seen.evaluate(CONTRAST).values()) >= 4.5, scheme
    assert errors == []


def test_a_chart_tells_its_values_to_pointer_and_keyboard(open_page, report):
    seen = open_page(report, width=1280)
    chart = seen.locator("svg.chart").first
    chart.scroll_into_view_if_needed()
    seen.evaluate("new Promise(done => setTimeout(done, 200))")  # a scroll hides the tip
    chart.locator(".value").first.hover()
    tip = seen.locator(".tip")
    tip.wait_for(state="visible")
    assert tip.inner_text() == "main, clean: 92.50% (80.1 to 97.5), n = 40"
    seen.mouse.move(2, 2)
    tip.wait_for(state="hidden")
    chart.focus()
    seen.keyboard.press("ArrowRight")
    tip.wait_for(state="visible")
    assert "n = 40" in tip.inner_text()
    told = seen.evaluate("[...document.querySelectorAll('svg.chart')].map("
                         "c => c.querySelectorAll('.value').length)")  # fmt: skip
    assert sum(count > 0 for count in told) >= len(told) - 1  # one panel of a search has none


def test_a_filter_leaves_the_rows_with_all_words(open_page, report):
    seen = open_page(report, width=1280)
    line = seen.locator(".filter").first
    line.locator("input").fill("standard fgsm")
    assert line.locator("span").inner_text() == "1 of 8"
    rows = line.locator("xpath=following-sibling::div[1]").locator("tbody tr:visible")
    assert rows.count() == 1
    assert "fgsm" in rows.first.inner_text()


def test_without_scripts_the_page_is_complete(open_page, report):
    seen = open_page(report, width=1280, scripts=False)
    assert seen.locator(".filter").count() == seen.locator(".tip").count() == 0
    title = seen.locator("svg.chart .value > title").first
    assert title.text_content() == "main, clean: 92.50% (80.1 to 97.5), n = 40"
    seen.locator("details.fold summary").first.click()
    assert seen.locator("details.fold[open] li").first.is_visible()


def test_printed_pages_cut_no_table(open_page, report, tmp_path):
    seen = open_page(report, width=A4_WIDTH)
    seen.emulate_media(media="print", color_scheme="dark")
    found = seen.evaluate(LAYOUT)
    assert found["cut"] == found["clipped"] == []
    style = "getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()"
    assert seen.evaluate(style) == "#fdfdfc"  # paper is white, whatever the screen shows
    seen.emulate_media(media=None, color_scheme="light")
    printed = seen.pdf(prefer_css_page_size=True)
    assert printed.startswith(b"%PDF")
    assert 3 <= printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") <= 40
