"""`casemate estimate --measure` against what then happens, step by step.

`python -m tests.benchmarks.estimates [CASE ...]`, with `--json`, or for a recipe of your own with
`--recipe demo --set train.epochs=2`. Each case is estimated, then run with one
core, so that steps follow each other. By the clock a step lasts from the end of the one before it;
processor time is that of all processes of the run meanwhile, the driver's included. Where other
programs share the machine only processor time compares. The share of items that withstood is read
from the results and given to the estimate, which cannot know it: `range` is that without it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from pipelines.flow.overheads import timed_flow
from pipelines.recipe.costs import Speed

VIT = {"architecture": "tiny_vit", "token_policy": "drop",
       "options": {"patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 4}}  # fmt: skip
DIGITS = {"source": "mnist5k", "image_size": 32, "limits": {"train": 2000, "val": 256, "test": 200}}
CASES: dict[str, dict[str, Any]] = {
    "pgd-training": {
        "train": {"objective": {"kind": "pgd", "eps": 0.1, "num_steps": 7}, "epochs": 10},
    },
    "columns-patch": {
        "train": {"objective": {"kind": "columns", "band": 5}, "epochs": 40},
        "certify": {"patch": {"kind": "columns", "patch_sizes": [1, 2]}},
        "evaluate": None,
    },
    "noise-l2": {
        "train": {"objective": {"kind": "gaussian", "sigma": 0.25}, "epochs": 20},
        "certify": {
            "l2": {"kind": "gaussian", "sigma": 0.25, "num_estimate": 2000, "block_size": 1000,
                   "radii": [0.25]}
        },
        "evaluate": None,
    },
    "autoattack": {
        "train": {"objective": {"kind": "fgsm", "eps": 0.1}, "epochs": 12},
        "attack": {
            "linf": {"eps": 0.03, "num_items": 100, "sanity": None,
                     "attacks": [{"kind": "autoattack", "num_steps": 30, "num_queries": 400}]}
        },
    },
    "corruptions": {
        "train": {"objective": {"kind": "standard"}, "epochs": 15},
        "evaluate": {"corruptions": {}, "subset": {"num_items": 150}},
    },
    "tune-grid": {
        "train": {"objective": {"kind": "trades", "eps": 0.1, "num_steps": 3}, "epochs": 1},
        "tune": {"space": {"train.learning_rate": [0.0005, 0.001, 0.002, 0.003]}, "epochs": 3,
                 "attack": {"num_steps": 10, "num_items": 100}},
        "evaluate": None,
    },
}  # fmt: skip
Figures = dict[str, Any]


def estimated(recipe: Path, options: list[str], *further: str) -> list[Figures]:
    """The rows of the estimate."""
    command = ["casemate", "estimate", str(recipe), *options, "--measure", "--json", *further]
    return json.loads(_run(command))


def _run(command: list[str]) -> str:
    place = Path(sys.executable).with_name(command[0])
    done = subprocess.run([place, *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def real(recipe: Path, options: list[str], storage: Path) -> dict[str, Speed]:
    """Seconds of every step, by the clock and of the processor."""
    command = [sys.executable, "-m", "pipelines.cli", "run", str(recipe), *options]
    return timed_flow([*command, "--set", f"storage.root={storage}"])


def withstood(storage: Path) -> float | None:
    """Share of the items that withstood the attacks of a run, or of its last validation."""
    shares = []
    for path in storage.glob("*/attack.*/summary.json"):
        models = json.loads(path.read_text())["models"].values()
        shares += [model["robust_accuracy"]["value"] for model in models]
    if not shares:
        for path in storage.glob("*/train.*/history.json"):
            rows = json.loads(path.read_text())["rows"]
            values = [row["val_robust_accuracy"] for row in rows]
            shares += [sum(values) / len(values)] if None not in values else []
        for path in storage.glob("*/tune-*/trials.json"):
            rows = json.loads(path.read_text())["rows"]
            shares += [row["val_robust_accuracy"]["value"] for row in rows]
    return sum(shares) / len(shares) if shares else None


def compare(name: str, recipe: Path, options: list[str], folder: Path) -> Figures:
    """Both, step by step."""
    measured = real(recipe, options, folder / "runs")
    share = withstood(folder / "runs")
    told = [] if share is None else ["--withstand", f"{share:.3f}"]
    guessed = {row["step"]: row for row in estimated(recipe, options, *told)}
    steps = []
    for step, took in measured.items():
        row = guessed.get(step)
        if row is None:
            continue
        (here,) = row["hours"]
        cpu, wall = (1800 * (here[f"{key}low"] + here[f"{key}high"]) for key in ("cpu_", ""))
        steps.append({"step": step, "cpu": took.cpu, "estimated_cpu": cpu,
                      "wall": took.wall, "estimated_wall": wall})  # fmt: skip
    total = {
        key: sum(step[key] for step in steps)
        for key in ("cpu", "estimated_cpu", "wall", "estimated_wall")
    }
    return {"case": name, "withstood": share, "steps": steps, "all": {"step": "all", **total}}


def table(found: Figures) -> str:
    """One line per step."""
    share = found["withstood"]
    lines = [f"{found['case']}" + ("" if share is None else f", withstood: {share:.2f}")]
    head = ("step", "processor s", "estimated", "ratio", "clock s", "estimated", "ratio")
    lines.append(f"  {head[0]:<16}" + "".join(f"{word:>13}" for word in head[1:]))
    for row in [*found["steps"], found["all"]]:
        cells = []
        for key in ("cpu", "wall"):
            took, guess = row[key], row[f"estimated_{key}"]
            cells += [f"{took:.1f}", f"{guess:.1f}", f"{guess / took:.2f}"]
        lines.append(f"  {row['step']:<16}" + "".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--recipe", help="a recipe of your own instead of the cases")
    parser.add_argument("--set", dest="changes", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if unknown := set(asked.cases) - CASES.keys():
        parser.error(f"unknown: {', '.join(unknown)}; choose {', '.join(CASES)}")
    options = [word for change in asked.changes for word in ("--set", change)]
    options += ["--set", "cluster.num_cpus=1"]
    found = []
    for name in [asked.recipe] if asked.recipe else asked.cases or CASES:
        with tempfile.TemporaryDirectory() as text:
            folder, recipe = Path(text), Path(asked.recipe or "")
            if name in CASES:
                recipe = folder / f"{name}.yaml"
                whole = {"name": name, "data": DIGITS, "model": VIT, **CASES[name]}
                whole["train"] = {"batch_size": 64, **whole["train"]}
                recipe.write_text(yaml.safe_dump(whole))
            found.append(compare(name, recipe, options, folder))
        if not asked.json:
            print(table(found[-1]), flush=True)
    if asked.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
