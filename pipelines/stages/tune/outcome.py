"""The result of a finished search as commands show it: its best trial and its best recipe."""

import json
from collections.abc import Mapping
from typing import Any, TypedDict, cast

from components.core.folders import Folder, within
from components.core.shares import shown as shown_share
from pipelines.stages.registry import Share


class SearchOutcome(TypedDict):
    """The best trial of a search, by its metric on validation items."""

    trial: int
    name: str | None  # of a step of an additive ablation
    num_trials: int
    num_stopped_early: int
    num_tied: int  # further trials whose difference to the best one is not significant
    values: Mapping[str, Any]
    metric: str
    score: Share
    chance: float | None  # share of the most frequent label on these items; None: an older search
    at_chance: bool
    best_recipe: str  # path or URI of best.yaml


def search_outcome(folder: Folder, *, shown: Folder) -> SearchOutcome:
    """The result in the folder of a finished search; `shown` is the folder to show to people."""
    document = json.loads((folder / "trials.json").read_text())
    rows, metric, chance = document["rows"], document["metric"], document.get("chance")
    best = rows[0]  # ranked
    score = cast(Share, shown_share(best[metric]))
    return {
        "trial": best["trial"],
        "name": best.get("name"),
        "num_trials": len(rows),
        "num_stopped_early": sum(row["status"] == "stopped early" for row in rows),
        "num_tied": sum(row["tied_with_best"] for row in rows[1:]),
        "values": best["values"],
        "metric": metric,
        "score": score,
        "chance": chance,
        "at_chance": chance is not None and score["low"] <= chance,
        "best_recipe": str(within(shown, "best.yaml")),
    }
