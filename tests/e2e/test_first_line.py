"""Something is on the screen before anything heavy is loaded."""

import os
import pty
import subprocess
import sys

import pytest

from tests.e2e.cli import ROOT
from tests.terminal import plain

pytestmark = pytest.mark.e2e
HEAVY = ("torch", "torchvision", "ray", "mlflow", "timm", "pandas", "scipy", "pyarrow")
# The first write to the terminal ends the process and says what was loaded by then.
SCRIPT = f"""
import os, sys
from rich.console import Console
from rich.live import Live

def first(self, *args, **kwargs):
    loaded = sorted(set({HEAVY!r}) & set(sys.modules))
    os.write(2, f"{{self.get_renderable().text}} after {{loaded}}".encode())
    os._exit(0)

Live.start = first
from pipelines.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("run demo", "demo: reading and checking the recipe"),
        ("attack demo", "demo: reading and checking the recipe"),
        ("attack --model timm:resnet18 --data digits --eps 8/255", "timm:resnet18: loading"),
        ("certify --model python:net.py:build --data digits --sigma 0.25", "net.py:build: loading"),
    ],
)
def test_the_first_words_come_before_the_heavy_imports(arguments, text):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", SCRIPT, *arguments.split()]
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"}
    process = subprocess.Popen(command, cwd=ROOT, stderr=theirs, env=env)
    os.close(theirs)
    said = os.read(ours, 4096).decode()
    os.close(ours)
    assert process.wait(timeout=60) == 0
    (line,) = [line for line in plain(said) if line.strip()]
    assert text in line
    assert line.endswith("after []")
