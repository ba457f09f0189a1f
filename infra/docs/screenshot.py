"""Takes the picture of the report that the README shows.

    casemate run demo && python -m infra.docs.screenshot

The top of the page, 1280 pixels wide, in its light colours; needs a Chromium (`make browser`).
"""

import sys
from pathlib import Path

from tests.e2e.browser import browser_pages, find_chromium

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "notebooks" / "results" / "report.png"
WIDTH, HEIGHT = 1280, 1500
MOST_BYTES = 1_000_000


def report_in(folder: Path) -> Path:
    """The page of a report step, or of the newest one of a flow."""
    found = [*folder.glob("report.html"), *folder.glob("report-*/report.html")]
    if not found:
        sys.exit(f"screenshot: {folder} holds no report.html; run `casemate run demo` first")
    return max(found, key=lambda page: page.stat().st_mtime)


def take(report: Path, picture: Path) -> None:
    """Write the top of a report as PNG."""
    if find_chromium() is None:
        sys.exit("screenshot: no Chromium here; `make browser` installs one")
    with browser_pages() as open_page:
        page = open_page(report, width=WIDTH)
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT}
        page.screenshot(path=picture, full_page=True, clip=clip)
    if picture.stat().st_size > MOST_BYTES:
        sys.exit(f"screenshot: {picture} has more than {MOST_BYTES:,} bytes")


if __name__ == "__main__":
    flow = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "demo"
    take(report_in(flow), PICTURE)
    size = PICTURE.stat().st_size
    sys.stdout.write(f"screenshot: {PICTURE.relative_to(ROOT)}, {size:,} bytes\n")
