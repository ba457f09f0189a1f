"""Whether finished results hold: what `gate`, `compare` and `card` check before they use one."""

from pathlib import Path

from components.core.errors import CasemateError, first_line
from pipelines.api.certificates import verify
from pipelines.api.found_results import FoundResult


def first_problem(result: FoundResult, key: str | Path | None = None) -> str:
    """Why a result cannot be trusted, or nothing.

    Files must be those of the step; claims of a certificate follow from its votes, accuracies of an
    attack from its rows. With a public `key` certificates must be signed.
    """
    from pipelines.runtime.verified_steps import attack_problems, summed_up

    try:
        problems = result.changed()
        if result.stage == "certify":
            problems += verify(result.place, key=key).problems
        elif result.stage == "attack":
            problems += attack_problems(result.files)
    except (CasemateError, KeyError, ValueError, TypeError) as error:
        problems = [first_line(error)]
    return summed_up(problems)
