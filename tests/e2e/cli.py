"""The command line as a user calls it, and the small recipe that end-to-end tests run."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]

TINY: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "data": {"source": "digits", "split_seed": 3, "limits": {"train": 1000, "val": 60, "test": 24}},
    "model": {
        "architecture": "tiny_vit",
        "options": {"patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 2},
        "token_policy": "drop",
    },
    "train": {
        "objective": {"kind": "fgsm", "eps": 0.05, "eps_warmup_epochs": 1},
        "variants": {"columns": {"objective": {"kind": "columns", "band": 2}, "epochs": 10}},
        "epochs": 6,
        "batch_size": 16,
        "learning_rate": 0.003,
        "val_items": 20,
        "val_steps": 2,
    },
    "attack": {
        "linf": {
            "eps": 0.05,
            "attacks": [{"kind": "fgsm"}, {"kind": "pgd", "num_steps": 5}, {"kind": "apgd-ce"}],
            "curves": {"eps": [0.02, 0.05, 0.1], "steps": [1, 5], "num_items": 24},
            "surrogate": "columns",
        }
    },
    "certify": {
        "patch": {
            "kind": "columns",
            "model": "columns",
            "patch_sizes": [1, 2],
            "challenge": {"patch_size": 1, "num_items": 4, "num_steps": 3, "num_positions": 2},
        },
        "l2": {
            "kind": "gaussian",
            "model": "main",
            "sigma": 0.1,
            "num_select": 20,
            "num_estimate": 400,
            "block_size": 50,
            "micro_batch": 50,
            "radii": [0.05, 0.1],
            "num_items": 24,
            "challenge": {"eps": 0.05, "num_items": 4, "num_steps": 2, "num_predict": 50},
        },
    },
    "cluster": {"num_cpus": 2, "object_store_mb": 128},
}

CLEANER: dict[str, Any] = {
    "objective": {"kind": "denoiser", "sigmas": [0.1]},
    "model": {"architecture": "tiny_unet", "options": {"widths": [8, 16], "norm_groups": 2}},
    "epochs": 2,
}
BEHIND: dict[str, Any] = {
    "kind": "gaussian",
    "denoiser": "cleaner",
    "sigma": 0.1,
    "num_select": 20,
    "num_items": 16,
    "micro_batch": 50,
    "radii": [0.05, 0.1],
}
# The small recipe and a denoiser: one certificate that stops early, one whose denoiser draws too.
WHOLE: dict[str, Any] = {
    **TINY,
    "train": {
        **TINY["train"],
        "variants": {**TINY["train"]["variants"], "cleaner": CLEANER},
    },
    "certify": {
        **TINY["certify"],
        "early": {**BEHIND, "method": "sequential", "num_estimate": 4000, "block_size": 200},
        "denoised": {
            **BEHIND,
            "sampler": {"kind": "ancestral", "num_steps": 3},
            "num_estimate": 600,
            "block_size": 50,
        },
    },
}


def tiny_recipe(path: Path, **changes: Any) -> Path:
    """The small recipe as a file, with top-level sections replaced."""
    return write_recipe(path, TINY | changes)


def write_recipe(path: Path, values: Mapping[str, Any]) -> Path:
    values = json.loads(json.dumps(values))  # without YAML's anchors for what is there twice
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """Runs `python -m pipelines.cli` in a fresh process, as a user's shell would."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root

    def start(self, *arguments: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pipelines.cli", *map(str, arguments)],
            cwd=self.root,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: object, env: dict[str, str] | None = None) -> Result:
        process = self.start(*arguments, env=env)
        out, err = process.communicate(timeout=800)
        return Result(process.returncode, out, err)

    def kill_when(self, ready: Callable[[], bool], *arguments: object) -> None:
        """Start a command and end it with SIGKILL as soon as `ready()` holds."""
        process = self.start(*arguments)
        try:
            wait_until(lambda: ready() or process.poll() is not None)
            assert process.poll() is None, f"ended before it could be killed: {process.stderr}"
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)

    def kill_worker_when(self, ready: Callable[[], bool], *arguments: object) -> Result:
        """Start a command, kill one of its actors (SIGKILL) once `ready()` holds, let it finish."""
        process = self.start(*arguments)
        try:
            wait_until(lambda: ready() or process.poll() is not None)
            next(actors_of(process.pid, "ShardWorker")).kill()
            out, err = process.communicate(timeout=800)
        finally:
            process.kill()
        return Result(process.returncode, out, err)


def actors_of(pid: int, name: str) -> Iterator[psutil.Process]:
    """Processes below this one that call themselves after a class of Ray actors."""
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "".join(process.cmdline()).startswith(f"ray::{name}"):
                yield process


def call(*arguments: object) -> Result:
    """The same entry point inside this process: joins its Ray session and saves the imports."""
    from pipelines.cli.main import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = mock.patch.object(sys, "argv", ["casemate", *map(str, arguments)])
    with argv, redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def mistake_of(*arguments: object) -> str:
    """The one line with which a command refuses bad input."""
    said = call(*arguments)
    assert said.code == 2, said.out + said.err
    *progress, line = said.err.splitlines()
    assert "Traceback" not in said.err
    assert not any(one.startswith("casemate: ") for one in progress), said.err
    return line.removeprefix("casemate: ")


def wait_until(condition: Callable[[], bool], *, seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def step_folder(storage: Path, step: str) -> Path:
    """The one folder of a step below a storage."""
    (folder,) = storage.glob(f"*/{step}-*")
    return folder


def check_same_data(*storages: Path) -> None:
    """Both prepared datasets have the same bytes."""
    ours, theirs = (step_folder(root, "prepare") for root in storages)
    for name in ("train-00000.parquet", "dataset.json"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
