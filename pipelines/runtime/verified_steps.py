"""Whether finished results hold: files are those of the step, figures follow from their rows."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from components.core.errors import CasemateError, first_line
from components.core.folders import Folder, fetched
from pipelines.runtime.artifacts import manifest_of
from pipelines.runtime.manifests import changed_files, other_manifests


def first_step_problem(stage: str, folder: Folder) -> str:
    """Why a finished step cannot be trusted, or nothing; certificates need not be signed.

    Files are named without their place on this machine.
    """
    from components.certify.verify import verify

    place: Path | None = None
    try:
        place = fetched(folder)
        problems = list(_changed(folder, place))
        if stage == "certify":
            problems += verify(place).problems
        elif stage == "attack":
            problems += attack_problems(place)
    except (CasemateError, KeyError, ValueError, TypeError, OSError) as error:
        problems = [first_line(error)]
    problem = summed_up(problems)
    return problem.replace(f"{place}/", "") if place else problem


def summed_up(problems: list[str]) -> str:
    """The first problem, and how many more there are; nothing without any."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"does not verify: {problems[0]}{more}" if problems else ""


def _changed(folder: Folder, place: Path) -> Iterator[str]:
    """Files that are not those of the manifest."""
    yield from (
        f"{n}: is not the file of the step" for n in changed_files(place, manifest_of(folder))
    )
    yield from (f"{n}: differs from manifest.json" for n in other_manifests(place))


def attack_problems(folder: Folder) -> list[str]:
    """Accuracies in the summary of an attack that its rows do not give."""
    from components.core.statistics import exact_accuracy
    from components.core.tables import read_table

    table = read_table(folder / "attacks.parquet").to_pandas()
    clean = table["clean_prediction"] == table["label"]
    robust = clean & (table["adversarial_prediction"] == table["label"])
    summary = json.loads((folder / "summary.json").read_text())
    return [
        f"summary.json: {what} of {model} is not that of attacks.parquet"
        for model, own in summary["models"].items()
        for what, verdicts in (("clean_accuracy", clean), ("robust_accuracy", robust))
        if not _is_same(own[what], exact_accuracy(verdicts[table["model"] == model].to_numpy()))
    ]


def _is_same(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether two accuracies agree; other versions of scipy may differ in digits of an interval."""
    exact = all(stored[name] == expected[name] for name in ("value", "num_items"))
    return exact and math.isclose(stored["low"], expected["low"], abs_tol=1e-9)
