"""Runs missing trials, then writes the results page: `python -m notebooks.replications`."""

import argparse
from pathlib import Path

from notebooks.replications.arms import ARMS, SIZES
from notebooks.replications.page import write_page
from notebooks.replications.trials import run_all, tidy

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m notebooks.replications", description=__doc__)
    parser.add_argument("--size", choices=[*SIZES], default="full")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of trials and page")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS], help="only these, and no page")
    given = parser.parse_args()
    path, size = given.out / "training.jsonl", SIZES[given.size]
    results = run_all(path, size, arms=given.arms or tuple(ARMS), report=print)
    if not given.arms:
        tidy(path, results)
        write_page(given.out, results, size)


if __name__ == "__main__":
    main()
