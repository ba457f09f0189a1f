"""Clusters: check one, send a flow to it, write the file that makes one."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from pipelines.api.runs import load_recipe
from pipelines.runtime.node_probe import ANSWER_SECONDS

if TYPE_CHECKING:
    from pipelines.api.runs import RecipeSource
    from pipelines.deploy.manifest import Manifest
    from pipelines.recipe.schema.recipe import Recipe
    from pipelines.runtime.findings import Finding
    from pipelines.runtime.flows import FlowJob

TRACKING_ENV = "MLFLOW_TRACKING_URI"
NO_RECIPE = {"name": "doctor", "data": {"source": "digits"}}


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
    from pipelines.recipe.gpus import unused_gpus
    from pipelines.runtime import jobs
    from pipelines.runtime.devices import gpus_at

    loaded = _placed(load_recipe(recipe, overrides=overrides, smoke=smoke), storage)
    check(loaded)
    if TRACKING_ENV in os.environ and not loaded.tracking.uri and TRACKING_ENV not in env:
        env = [*env, TRACKING_ENV]  # honoured as by `run`
    flags = [flag for flag, on in ((jobs.FORCE, force), (jobs.PARALLEL, parallel)) if on]
    job = jobs.submit(loaded, address=address, flags=flags, python=python, env=env, say=say)
    with suppress(CasemateError):  # the dashboard may not know its nodes
        if notice := unused_gpus(loaded, gpus_at(address)):
            say(str(notice))
    return job


def _placed(recipe: "Recipe", storage: str | None) -> "Recipe":
    """The recipe with its storage: a folder, or a URI of a kind that is supported."""
    from pipelines.recipe.load import with_values
    from pipelines.runtime.storage import STORAGE_KEY, refuse_odd_uri

    if storage is not None:
        refuse_odd_uri(storage, key="--storage")
        recipe = with_values(recipe, {STORAGE_KEY: storage})
    refuse_odd_uri(recipe.storage.root, key=STORAGE_KEY)
    return recipe


def doctor(
    recipe: "RecipeSource | None" = None,
    *,
    address: str | None = None,
    storage: str | None = None,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    env: Sequence[str] = (),
    python: str | None = None,
    timeout: float = ANSWER_SECONDS,
) -> "Iterator[Finding]":
    """Check a cluster, by default this machine: what would fail there, each with its remedy.

    `address` is that of Ray (`host:port`, from one of its machines) or of its dashboard
    (`http://...`, from anywhere; `env` and `python` as for `submit`). With a recipe, the files it
    names are looked for on every machine. Each machine has `timeout` seconds for its answer.

    >>> from pipelines import api
    >>> [f.message for f in api.doctor() if f.status == "FAIL"]  # doctest: +SKIP
    []
    """
    from pipelines.recipe.check import check

    loaded = load_recipe(recipe or NO_RECIPE, overrides=overrides, smoke=smoke)
    loaded = _placed(loaded, storage)
    if recipe:
        check(loaded)
    if address and address.startswith(("http://", "https://")):
        from pipelines.runtime.doctor_job import diagnose_by_job

        return diagnose_by_job(loaded, address=address, python=python, env=env, timeout=timeout)
    from pipelines.runtime.doctor import diagnose

    return diagnose(loaded, address=address, timeout=timeout)


def manifest(
    recipe: "RecipeSource",
    *,
    storage: str | None = None,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    **options: Any,
) -> "Manifest":
    """The file that runs a recipe's flow on a cluster, or makes a cluster for it.

    `options` are the fields of `pipelines.deploy.settings.ManifestSettings`: `kind` (rayjob,
    raycluster, argo, ray-up, skypilot), `image`, `claim`, `secret`, ... No cluster is asked.

    >>> from pipelines import api
    >>> api.manifest("demo", image="casemate:0.1.0", claim=["runs:/runs"]).name
    'demo'
    """
    from pipelines.deploy.flow import flow_of
    from pipelines.deploy.manifest import manifest_of, settings_of
    from pipelines.recipe.check import check
    from pipelines.recipe.load import available

    settings = settings_of(options)
    loaded = load_recipe(recipe, overrides=overrides, smoke=smoke)
    check(loaded)
    ready = recipe if isinstance(recipe, str) and recipe in available() else None
    flow = flow_of(loaded, settings, ready=ready, overrides=overrides, smoke=smoke, storage=storage)
    return manifest_of(flow)
