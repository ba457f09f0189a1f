"""Whether finished results hold: what `gate` and `compare` check before they use one."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.core.errors import CasemateError, first_line
from pipelines.api.certificates import verify
from pipelines.api.found_results import FoundResult


def first_problem(result: FoundResult, key: str | Path | None = None) -> str:
    """Why a result cannot be trusted, or nothing.

    Files must be those of the step; claims of a certificate follow from its votes, accuracies of an
    attack from its rows. With a public `key` certificates must be signed.
    """
    try:
        problems = result.changed()
        if result.stage == "certify":
            problems += verify(result.place, key=key).problems
        elif result.stage == "attack":
            problems += _attack_problems(result)
    except (CasemateError, KeyError, ValueError, TypeError) as error:
        problems = [first_line(error)]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"does not verify: {problems[0]}{more}" if problems else ""


def _attack_problems(result: FoundResult) -> list[str]:
    """Accuracies in the summary of an attack that its rows do not give."""
    from components.core.statistics import accuracy
    from components.core.tables import read_table

    table = read_table(result.files / "attacks.parquet").to_pandas()
    clean = table["clean_prediction"] == table["label"]
    robust = clean & (table["adversarial_prediction"] == table["label"])
    summary = json.loads((result.files / "summary.json").read_text())
    return [
        f"summary.json: {what} of {model} is not that of attacks.parquet"
        for model, own in summary["models"].items()
        for what, verdicts in (("clean_accuracy", clean), ("robust_accuracy", robust))
        if not _is_same(own[what], accuracy(verdicts[table["model"] == model].to_numpy()))
    ]


def _is_same(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether two accuracies agree; other versions of scipy may differ in digits of an interval."""
    exact = all(stored[name] == expected[name] for name in ("value", "num_items"))
    return exact and math.isclose(stored["low"], expected["low"], abs_tol=1e-9)
