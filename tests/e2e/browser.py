"""Opens a page in the system's Chromium and returns what a reader would meet there."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox", "--headless", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
MEASURE = """() => ({
  scrollWidth: document.scrollingElement.scrollWidth,
  innerWidth: window.innerWidth,
  figures: [...document.querySelectorAll('svg.chart, .picture img')].map(node => {
    const box = node.getBoundingClientRect();
    return [node.tagName, box.width, box.height, node.tagName === 'IMG' ? node.naturalWidth : 1];
  }),
  smallestText: Math.min(...[...document.querySelectorAll('svg.chart text')].map(
    node => {
      const turn = node.getScreenCTM();
      return parseFloat(getComputedStyle(node).fontSize) * Math.hypot(turn.a, turn.b);
    })),
})"""


@dataclass(frozen=True)
class Visit:
    """What a browser saw."""

    errors: tuple[str, ...]  # console and page errors
    requests: tuple[str, ...]  # beyond the page itself and data: addresses
    scroll_width: int
    inner_width: int
    figures: tuple[tuple[str, float, float, int], ...]  # tag, width, height, decoded width
    smallest_chart_text: float  # in CSS pixels


def check_page(seen: Visit, *, num_charts: int) -> None:
    """The page loads nothing, fits the window, and shows all figures at a readable size."""
    assert seen.errors == ()
    assert seen.requests == ()
    assert seen.scroll_width <= seen.inner_width
    assert len([f for f in seen.figures if f[0].lower() == "svg"]) == num_charts
    for tag, width, height, decoded in seen.figures:
        assert min(width, height) >= 40, tag
        assert decoded > 0
    assert seen.smallest_chart_text >= 10


def find_chromium() -> str | None:
    """Path of the system's browser, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def visit(
    page_file: Path,
    *,
    width: int,
    height: int,
    scheme: str = "light",
    screenshot: Path | None = None,
) -> Visit:
    """Open the file, unfold every `details`, and measure; `screenshot` keeps the whole page."""
    errors: list[str] = []
    requests: list[str] = []
    address = page_file.resolve().as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=ARGUMENTS)
        try:
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("request", lambda request: requests.append(request.url))
            page.goto(address)
            if screenshot:
                page.screenshot(path=screenshot, full_page=True)
            page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            facts = page.evaluate(MEASURE)
        finally:
            browser.close()
    foreign = [url for url in requests if url != address and not url.startswith("data:")]
    return Visit(
        tuple(errors), tuple(foreign), facts["scrollWidth"], facts["innerWidth"],
        tuple(tuple(figure) for figure in facts["figures"]), facts["smallestText"],
    )  # fmt: skip
