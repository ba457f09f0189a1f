"""Bars fit the terminal: step, bar, count, rate and time left are on the screen at any width."""

import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pipelines.runtime import bars
from pipelines.runtime.progress import Status
from tests.e2e.cli import ROOT
from tests.terminal import plain

WIDTHS = (60, 80, 120)
STAGES = st.builds(
    Status,
    step=st.sampled_from(["tune", "attack.linf", "certify.patch-b19-s7-with-a-long-name"]),
    unit=st.sampled_from(["items", "epochs", "trial epochs"]),
    done=st.floats(0, 99_999),
    total=st.just(100_000),
    rate=st.none() | st.floats(1e-4, 1e5),
    eta_seconds=st.none() | st.floats(0, 3e6),
    phase=st.sampled_from(["", "apgd-t"]),
    note=st.sampled_from(["", "loss 1.234 robust 0.301 " * 9]),
    workers=st.none() | st.integers(0, 4),
    workers_wanted=st.just(4),
)


def screen(stages: list[Status], width: int) -> list[str]:
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system=None)
    console.print(bars.picture(stages, width=width))
    return text.getvalue().splitlines()


@given(st.lists(STAGES, min_size=1, max_size=3), st.sampled_from(WIDTHS))
def test_what_matters_is_on_the_screen_at_every_width(stages, width):
    lines = screen(stages, width)
    assert all(len(line) <= width for line in lines)
    heads = [line for line in lines if not line.startswith("  ")]
    assert len(heads) == len(stages)
    for line, stage in zip(heads, stages, strict=True):
        assert line.startswith(stage.step[:3])
        assert f"{bars.number(stage.done)}/100000 {stage.unit}"[: bars.COUNT - 1] in line
        assert line.endswith(bars.time_left(stage.eta_seconds))
        assert bars.rate_of(stage.rate) in line


@pytest.mark.parametrize(
    ("per_second", "shown"),
    [(None, "?/s"), (12.34, "12.3/s"), (0.5, "30.0/min"), (0.001, "3.6/h"), (54321, "54321/s")],
)
def test_rates_are_in_a_unit_that_can_be_read(per_second, shown):
    assert bars.rate_of(per_second) == shown


def test_the_phase_comes_first_in_the_second_line():
    stage = Status(step="attack.linf", unit="items", done=1, total=2, phase="fab-t", note="0.5")
    assert bars.note_of(stage) == "fab-t; 0.5"


SCRIPT = """
import time
from pipelines.runtime import progress
with progress.bar("attack.linf", total=500, unit="items", phase="square") as bar:
    bar.at(100, "a note that is far too long for this line " * 5)
    time.sleep(1)  # the display is drawn four times a second
progress.say("attack.linf ended")
"""


@pytest.mark.parametrize("columns", [80, 120])
def test_a_real_terminal_shows_whole_lines_and_none_is_left_over(columns):
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    command = [sys.executable, "-c", SCRIPT]
    process = subprocess.Popen(command, cwd=ROOT, stderr=theirs, env={**env, "TERM": "xterm"})
    os.close(theirs)
    written = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # the other end was closed
            break
        if not chunk:
            break
        written += chunk
    os.close(ours)
    assert process.wait() == 0
    shown = [line for line in plain(written.decode()) if line.strip()]
    assert all(len(line) <= columns for line in shown)
    first = next(line for line in shown if line.startswith("attack.linf"))
    assert re.search(r"0/500 items +\?/s +\?:\?\?:\?\?", first)
    assert any(line.strip().startswith("square; a note") for line in shown)
    assert shown[-1] == "attack.linf ended"
