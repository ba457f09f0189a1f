"""The page of the leaderboard in a real browser: fits, sorts, filters, reads without scripts."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page

from components.report.leaderboard import leaderboard_page
from tests.e2e.browser import LAYOUT, browser_pages, check_page, find_chromium, visit

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no chromium, chromium-browser or google-chrome on this machine"
)
LONG = "a-recipe-with-a-rather-long-name-" * 4


def entry(label: str, rank: int | None, count: int, **changes: object) -> dict:
    share = count / 200
    fields = {
        **{"label": label, "rank": rank, "rank_at_best": rank, "rank_at_worst": rank, "ties": []},
        **{"verdict": "reliable", "footnote": "", "kind": "attacked", "num_items": 200},
        **{"accuracy": {"value": share, "low": share * 0.9, "high": min(1, share * 1.1)}},
        **{
            "clean_acc": f"{100 - share:.2f}",
            "defence": "",
            "architecture": "vit_small_patch16_224.augreg_in21k",
        },
        **{"model_digest": f"{count:064}", "results": [f"{label}/attack.linf-0123456789ab"]},
    }
    return fields | changes


def board(name: str, threat: str, kind: str, entries: list[dict], **changes: object) -> dict:
    fields = {
        **{"board": f"{threat}@x {name}", "threat": threat, "budget": "8/255", "kind": kind},
        **{"dataset": "cifar10", "dataset_digest": "d" * 64, "items_digest": "e" * 64},
        **{"num_items": 200, "small": False, "entries": entries},
        "protocol": {"attacks": [{"kind": "fgsm", "num_steps": 1, "targets": None}]},
    }
    return fields | changes


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    """Three chapters: two budgets of one threat, certificates, and a small board."""
    suspect = {"verdict": "suspect", "footnote": "suspect: gradients <b>vanish</b>"}
    robust = [
        entry("flow-a/main", 1, 120, ties=["flow-b/main"], rank_at_worst=2),
        entry("flow-b/main", 2, 110, ties=["flow-a/main"], rank_at_best=1),
        entry(f"{LONG}/main", 3, 9),
        entry("doubtful/main", None, 190, rank_at_best=None, rank_at_worst=None, **suspect),
    ]
    weaker = [entry("flow-b/main", 1, 150)]
    proven = [entry("flow-c/main", 1, 66, kind="proven", verdict="proven", defence="sigma 0.25")]
    few = [entry("flow-d/main", 1, 100)]
    document = {
        "boards": [
            board("00000001", "robust.linf", "attacked", weaker, budget="4/255"),
            board("00000002", "robust.linf", "attacked", robust),
            board("00000003", "certified.l2", "proven", proven, budget="0.5", protocol={}),
            board("00000004", "robust.linf", "attacked", few, small=True, items_digest="f" * 64),
        ],
        "left_out": [{"place": "flow-x/attack.linf-0", "why": "is not finished"}],
    }
    path = tmp_path_factory.mktemp("board") / "board.html"
    path.write_text(leaderboard_page(document), encoding="utf-8")
    return path


Opened = Callable[..., AbstractContextManager[Page]]


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    """Opens pages without errors in one browser for all tests of this module."""
    with browser_pages() as open_page:

        @contextmanager
        def open_one(path: Path, *, scripts: bool = True, width: int = 1280) -> Iterator[Page]:
            errors: list[str] = []
            page = open_page(path, width=width, scripts=scripts)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.reload()
            yield page
            page.context.close()
            assert errors == []

        yield open_one


def column(page: Page, section: str, number: int) -> list[str]:
    """The texts of a column, of the rows that are shown."""
    cells = page.locator(f"#{section} tbody tr:visible td:nth-child({number})")
    return [text.strip() for text in cells.all_inner_texts()]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "light"), (390, "dark")])
def test_the_page_fits_and_asks_for_nothing(page_file, width, scheme):
    seen = visit(page_file, width=width, height=900, scheme=scheme)
    check_page(seen, num_charts=0)


@pytest.mark.parametrize("width", [1280, 1440])
def test_no_column_of_a_board_is_cut_off_on_a_desk(opened, page_file, width):
    """With ties, reasons, long names and every other column that a board may have."""
    with opened(page_file, width=width) as page:
        assert page.evaluate(LAYOUT)["cut"] == []
        last = page.locator("#board-00000001 th:last-child:visible").first.bounding_box()
        assert last["x"] + last["width"] <= width


def test_columns_sort_as_numbers_and_empty_ranks_stay_last(opened, page_file):
    board = "board-00000001 .scroll:nth-of-type(2)"  # the second budget of the chapter
    with opened(page_file) as page:
        ranks = "1", "2", "3", "suspect"
        assert tuple(column(page, board, 1)) == ranks
        accuracy = page.locator(f"#{board} th:nth-child(3) button")
        accuracy.click()
        shares = [float(re.match(r"[\d.]+", text)[0]) for text in column(page, board, 3)]
        assert shares == sorted(shares, reverse=True) == [95.0, 60.0, 55.0, 4.5]
        accuracy.click()
        assert column(page, board, 1) == ["3", "2", "1", "suspect"]
        assert page.locator(f"#{board} th[aria-sort]").count() == 1
        page.locator(f"#{board} th:nth-child(1) button").click()
        assert tuple(column(page, board, 1)) == ranks
        page.locator(f"#{board} th:nth-child(1) button").click()
        assert column(page, board, 1) == ["3", "2", "1", "suspect"]  # no rank: last in both orders
        page.locator(f"#{board} th:nth-child(2) button").press("Enter")
        labels = column(page, board, 2)
        assert labels == sorted(labels)


def test_filters_leave_what_is_asked_for(opened, page_file):
    with opened(page_file, width=390) as page:
        boards = page.locator("main section[data-kind]")
        status = page.locator(".filters output")
        assert (boards.count(), status.inner_text()) == (3, "7 results")
        page.fill(".filters input[type=search]", "FLOW-B")
        assert column(page, "board-00000001", 2) == ["flow-b/main", "flow-a/main", "flow-b/main"]
        assert status.inner_text() == "3 of 7 results"  # flow-a has flow-b among its ties
        assert page.locator("main section[data-kind]:visible").count() == 1
        assert page.locator('nav a[href="#board-00000003"]').is_hidden()
        page.fill(".filters input[type=search]", "")
        page.select_option(".filters select[name=kind]", "proven")
        assert page.locator("main section[data-kind]:visible").count() == 1
        assert column(page, "board-00000003", 2) == ["flow-c/main"]
        page.select_option(".filters select[name=kind]", "")
        page.select_option(".filters select[name=items]", "fewer than 100")
        assert column(page, "board-00000004", 2) == ["flow-d/main"]
        page.select_option(".filters select[name=items]", "")
        page.check(".filters input[name=reliable]")
        assert status.inner_text() == "6 of 7 results"
        assert "doubtful/main" not in column(page, "board-00000001", 2)
        assert page.locator(".filters select[name=dataset]").count() == 0  # there is one only
        width = page.evaluate("[document.scrollingElement.scrollWidth, window.innerWidth]")
        assert width[0] <= width[1]


def test_without_scripts_everything_is_there_and_nothing_is_dead(opened, page_file):
    with opened(page_file, scripts=False) as page:
        assert page.locator(".filters, th button").count() == 0
        assert page.locator("main section[data-kind]:visible").count() == 3
        assert column(page, "board-00000001", 1) == ["1", "1", "2", "3", "suspect"]
        text = page.locator("main").inner_text()
        for words in ("suspect", "gradients <b>vanish</b>", "1 to 2", "33.0%", "is not finished"):
            assert words in text
