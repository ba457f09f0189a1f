"""Bars on a terminal: several at once, none left over, and silence elsewhere."""

import io

import pytest
from rich.console import Console

from pipelines.runtime import progress


@pytest.fixture
def terminal(monkeypatch):
    text = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=text, force_terminal=True, width=120))
    return text


def test_bars_of_concurrent_work_share_the_one_display(terminal):
    with (
        progress.bar("first", total=2, unit="units") as first,
        progress.bar("second", total=4, unit="units", done=1) as second,
    ):
        first.advance()
        second.at(3, "halfway there")
    assert "first" in terminal.getvalue()
    assert "second" in terminal.getvalue()
    with progress.bar("third", total=1, unit="units"):  # the display starts anew after the last
        pass
    assert "third" in terminal.getvalue()


def test_nothing_is_written_where_nobody_watches(monkeypatch):
    text = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=text, force_terminal=False))
    with progress.bar("quiet", total=1, unit="units") as bar:
        bar.advance()
    assert text.getvalue() == ""


def test_following_looks_once_more_at_the_end_and_hides_no_error(terminal):
    looks = []
    with progress.follow("far", total=1, unit="units", look=looks.append, every=60):
        assert looks == []
    assert len(looks) == 1

    def fail(bar):
        raise OSError("the diary is gone")

    with (
        pytest.raises(OSError, match="diary"),
        progress.follow("far", total=1, unit="u", look=fail, every=60),
    ):
        pass
