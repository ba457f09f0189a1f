"""A user-defined objective, named `python:file.py:Name` (`components/core/user_code.py`).

`Name(settings, label_smoothing=...)` returns an `Objective`.
"""

from components.core.errors import CasemateError
from components.core.user_code import UserEntry
from components.train.objectives.base import Objective

NEEDED = ("loss", "validation_logits", "eps_at")


def user_objective(entry: UserEntry, *, label_smoothing: float) -> Objective:
    """The objective of a user-defined entry."""
    try:
        made: Objective = entry.load()(entry.settings, label_smoothing=label_smoothing)
    except CasemateError:
        raise
    except Exception as error:
        remedy = f"fails to start: {type(error).__name__}: {' '.join(str(error).split())}"
        raise CasemateError("train.objective.kind", entry.kind, remedy) from error
    missing = [name for name in NEEDED if not hasattr(made, name)]
    if getattr(type(made), "loss", None) is Objective.loss:  # inherited, raises
        missing.append("loss")
    if missing:
        remedy = f"is not an objective: it lacks {', '.join(missing)}; derive it from Objective"
        raise CasemateError("train.objective.kind", entry.kind, remedy)
    return made
