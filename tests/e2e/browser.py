"""Opens a page in the system's Chromium and returns what a reader would meet there."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Playwright, ViewportSize, sync_playwright

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


_THREAD = ThreadPoolExecutor(1)  # owns the browser: playwright keeps an event loop in its thread
_OPENED: list[tuple[Playwright, Browser]] = []


def _browser() -> Browser:
    """One browser for all visits of this process: it takes two seconds of processor to start."""
    if not _OPENED:
        playwright = sync_playwright().start()
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=ARGUMENTS)
        _OPENED.append((playwright, browser))
    return _OPENED[0][1]


def close_browser() -> None:
    """End the browser of this process if there is one."""

    def close() -> None:
        while _OPENED:
            playwright, browser = _OPENED.pop()
            browser.close()
            playwright.stop()

    _THREAD.submit(close).result()


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

    def look() -> dict[str, Any]:
        page = _browser().new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        try:
            page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("request", lambda request: requests.append(request.url))
            page.goto(address)
            if screenshot:
                page.screenshot(path=screenshot, full_page=True)
            page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            return page.evaluate(MEASURE)
        finally:
            page.close()

    facts = _THREAD.submit(look).result()
    foreign = [url for url in requests if url != address and not url.startswith("data:")]
    return Visit(
        tuple(errors), tuple(foreign), facts["scrollWidth"], facts["innerWidth"],
        tuple(tuple(figure) for figure in facts["figures"]), facts["smallestText"],
    )  # fmt: skip


LAYOUT = """() => {
  const seen = node => node.getClientRects().length > 0;
  const named = node => node.getAttribute('aria-label') || node.className;
  const cut = [...document.querySelectorAll('.scroll, .headline')]
    .filter(node => seen(node) && node.scrollWidth > node.clientWidth + 1).map(named);
  const gaps = [];
  for (const row of document.querySelectorAll('.scroll tbody tr')) {
    const box = row.getBoundingClientRect();
    if (!box.height) continue;
    const pane = row.closest('.scroll').getBoundingClientRect();
    const filled = [...row.cells].map(cell => {
      const range = document.createRange();
      range.selectNodeContents(cell);
      const own = range.getBoundingClientRect();
      return own.left < pane.right && own.right > pane.left ? [own.top, own.bottom] : null;
    }).filter(Boolean);
    const used = Math.max(...filled.map(f => f[1])) - Math.min(...filled.map(f => f[0]));
    if (box.height - used > 40) gaps.push(`${row.textContent.trim().slice(0, 30)}: ${box.height}`);
  }
  const clipped = [], overlapping = [], struck = [];
  for (const chart of document.querySelectorAll('svg.chart')) {
    const frame = chart.getBoundingClientRect();
    const name = chart.getAttribute('aria-label').slice(0, 40);
    const texts = [...chart.querySelectorAll('text')].filter(text => text.textContent.trim());
    const boxes = texts.map(text => text.getBoundingClientRect());
    texts.forEach((text, i) => {
      const a = boxes[i], what = `${name}: ${text.textContent}`;
      if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.top < frame.top - 1 ||
          a.bottom > frame.bottom + 1) clipped.push(what);
      for (let k = i + 1; k < texts.length; k++) {
        const b = boxes[k];
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 2 && high > 0.3 * Math.min(a.height, b.height))
          overlapping.push(`${what} and ${texts[k].textContent}`);
      }
    });
    for (const path of chart.querySelectorAll('path')) {
      const style = getComputedStyle(path);
      if (style.fill !== 'none' || style.stroke === 'none') continue;
      if (path.closest('defs, .value')) continue;
      const hole = /#[^")]+/.exec(path.getAttribute('clip-path') || '');
      const clip = hole && chart.querySelector(`${hole[0]} rect`)?.getBBox();
      const turn = path.getScreenCTM(), length = path.getTotalLength();
      for (let at = 0; at <= length; at += Math.max(length / 300, 0.5)) {
        const raw = path.getPointAtLength(at), spot = raw.matrixTransform(turn);
        if (clip && (raw.x < clip.x || raw.x > clip.x + clip.width)) continue;
        boxes.forEach((a, i) => {
          const covered = texts[i].parentElement.querySelector(':scope > g path');
          if (covered && path.compareDocumentPosition(texts[i]) & 4) return; // painted over
          if (spot.x > a.left + 2 && spot.x < a.right - 2 && spot.y > a.top + 0.3 * a.height &&
              spot.y < a.bottom - 0.3 * a.height) struck.push(`${name}: ${texts[i].textContent}`);
        });
      }
    }
  }
  const unique = list => [...new Set(list)];
  return { cut, gaps, clipped, overlapping: unique(overlapping), struck: unique(struck) };
}"""
CONTRAST = """() => {
  const paint = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const light = colour => {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = colour;
    paint.fillRect(0, 0, 1, 1);
    const parts = [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => v / 255);
    const [r, g, b] = parts.map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = getComputedStyle(document.documentElement);
  const of = name => light(style.getPropertyValue(`--${name}`).trim());
  const grounds = [of('ground'), of('paper')];
  const worst = name => Math.min(...grounds.map(ground => {
    const [low, high] = [of(name), ground].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  }));
  return Object.fromEntries(
    ['ink', 'muted', 'attacked', 'proven', 'alarm', 'good'].map(name => [name, worst(name)]));
}"""
A4_WIDTH = 688  # CSS pixels between margins of 14 mm


@contextmanager
def browser_pages() -> Iterator[Callable[..., Page]]:
    """One browser; the function opens a file at a width and returns the loaded page."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=ARGUMENTS)

        def open_page(page_file: Path, *, width: int, scripts: bool = True) -> Page:
            size: ViewportSize = {"width": width, "height": 900}
            context = browser.new_context(viewport=size, java_script_enabled=scripts)
            page = context.new_page()
            page.goto(page_file.resolve().as_uri())
            return page

        try:
            yield open_page
        finally:
            browser.close()


def unfold(page: Page) -> None:
    """Open every `details`, as a reader may."""
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
