"""Clusters: send a flow to one."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pipelines.api.runs import load_recipe

if TYPE_CHECKING:
    from pipelines.api.runs import RecipeSource
    from pipelines.runtime.flows import FlowJob

TRACKING_ENV = "MLFLOW_TRACKING_URI"


def submit(
    recipe: "RecipeSource",
    *,
    address: str,
    storage: str | None = None,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    force: bool = False,
    parallel: bool = False,
    env: Sequence[str] = (),
    python: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> "FlowJob":
    """Send a recipe's flow to the cluster whose dashboard is at `address`; returns its job.

    `env` names variables of this process to forward, `parallel` runs stages that do not need each
    other side by side, `python` is the interpreter on the cluster, `say` gets notes. The same
    recipe into the same storage is the same flow: one that runs already is returned.

    >>> from pipelines import api
    >>> dashboard = "http://127.0.0.1:8265"
    >>> api.submit("demo", address=dashboard, storage="/shared/runs").flow  # doctest: +SKIP
    """
    from pipelines.recipe.check import check
    from pipelines.recipe.load import with_values
    from pipelines.runtime import jobs
    from pipelines.runtime.artifacts import refuse_url

    loaded = load_recipe(recipe, overrides=overrides, smoke=smoke)
    check(loaded)
    if storage is not None:
        refuse_url(storage, key="--storage")
        loaded = with_values(loaded, {"storage.root": storage})
    refuse_url(loaded.storage.root, key="storage.root")
    if TRACKING_ENV in os.environ and not loaded.tracking.uri and TRACKING_ENV not in env:
        say(f"{TRACKING_ENV} is set here, but not forwarded: add --env {TRACKING_ENV}")
    flags = [flag for flag, on in ((jobs.FORCE, force), (jobs.PARALLEL, parallel)) if on]
    return jobs.submit(loaded, address=address, flags=flags, python=python, env=env, say=say)
