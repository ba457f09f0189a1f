"""Commands of the Ray Jobs API: submit, status, logs, stop, and the entry points of jobs."""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from components.core.errors import CasemateError
from pipelines.api import load_recipe
from pipelines.cli.options import (
    ForceOpt,
    JobsOpt,
    JsonOpt,
    RecipeArg,
    SetOpt,
    SmokeOpt,
    StorageOpt,
)

commands = typer.Typer()
DASHBOARD = "http://127.0.0.1:8265"


@commands.command(
    epilog="Example: casemate submit demo --address http://127.0.0.1:8265 --storage /shared/runs"
)
def submit(
    recipe: RecipeArg,
    address: JobsOpt = DASHBOARD,
    set_: SetOpt = None,
    storage: StorageOpt = None,
    smoke: SmokeOpt = False,
    force: ForceOpt = False,
    python: Annotated[str | None, typer.Option(help="Interpreter on the cluster.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the flow to its end.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Send a flow to a cluster: a controller job that runs every stage as its own Ray job."""
    from pipelines.recipe.check import check
    from pipelines.runtime import jobs

    loaded = load_recipe(recipe, overrides=set_ or [], smoke=smoke)
    check(loaded)
    place = storage or loaded.storage.root
    if "://" in place:
        raise CasemateError("--storage", place, "is a URL; name a folder that all nodes share")
    root = str(Path(place).resolve())
    job = jobs.submit(loaded, address=address, storage=root, force=force, python=python)
    print(
        json.dumps({"flow": job.flow, "job": job.job_id})
        if as_json
        else f"flow {job.flow}: job {job.job_id}"
    )
    _say_unused_gpus(loaded, address)
    if wait:
        _follow(jobs.connect(address), job.flow)


def _say_unused_gpus(recipe: Any, address: str) -> None:
    """Tell about GPUs that the flow will not use, if the dashboard knows its nodes."""
    from pipelines.recipe.gpus import unused_gpus
    from pipelines.runtime.devices import gpus_at

    with suppress(CasemateError):
        if notice := unused_gpus(recipe, gpus_at(address)):
            print(notice, file=sys.stderr)


def _follow(client: Any, flow: str) -> None:
    from pipelines.runtime import jobs

    seen: dict[str, str] = {}
    while True:
        found = jobs.find_flow(client, flow)
        for job in found:
            if seen.get(job.job_id) != job.status:
                seen[job.job_id] = job.status
                print(f"{job.stage:<10} {job.status:<10} {job.job_id}", flush=True)
        last = [job for job in found if job.stage == "flow"][-1]
        if not last.active:
            if last.status != "SUCCEEDED":
                print(client.get_job_logs(last.job_id), file=sys.stderr)
                raise typer.Exit(1)
            return
        time.sleep(1)


@commands.command(epilog="Example: casemate status demo-1a2b3c4d")
def status(
    flow: Annotated[str | None, typer.Argument(help="A flow; default: all.")] = None,
    address: JobsOpt = DASHBOARD,
    as_json: JsonOpt = False,
) -> None:
    """Show flows on a cluster and the state of their stages."""
    from pipelines.runtime import jobs

    client = jobs.connect(address)
    found = jobs.find_flow(client, flow) if flow else jobs.flow_jobs(client)
    if as_json:
        print(
            json.dumps(
                [{k: getattr(j, k) for k in ("flow", "stage", "job_id", "status")} for j in found],
                indent=2,
            )
        )
        return
    for job in found:
        print(f"{job.flow:<28} {job.stage:<10} {job.status:<10} {job.job_id}")


@commands.command(epilog="Example: casemate logs demo-1a2b3c4d --stage certify")
def logs(
    flow: Annotated[str, typer.Argument(help="A flow or a job id.")],
    stage: Annotated[str | None, typer.Option(help="Only this stage.")] = None,
    address: JobsOpt = DASHBOARD,
) -> None:
    """Print the logs of a flow's jobs."""
    from pipelines.runtime import jobs

    for job_id, text in jobs.logs(jobs.connect(address), flow, stage=stage):
        print(f"== {job_id}\n{text.rstrip()}")


@commands.command(epilog="Example: casemate stop demo-1a2b3c4d")
def stop(
    flow: Annotated[str, typer.Argument(help="A flow or a job id.")], address: JobsOpt = DASHBOARD
) -> None:
    """Stop a flow on a cluster; finished work stays, `submit` continues it."""
    from pipelines.runtime import jobs

    stopped = jobs.stop(jobs.connect(address), flow)
    print(f"stopped {len(stopped)} job(s) of {flow}; submit the recipe again to continue")


@commands.command(hidden=True)
def control() -> None:
    """The controller job of a submitted flow."""
    from pipelines.runtime import jobs
    from pipelines.stages.registry import stages_of

    loaded = _recipe_of_job()
    stages = [stage.name for stage in stages_of(loaded)]
    jobs.control(jobs.connect(None), loaded, stages, lambda text: print(text, flush=True))


@commands.command("stage-job", hidden=True)
def stage_job(stage: str) -> None:
    """One stage of a submitted flow."""
    from pipelines.flow import run as flow

    force = "--force" in os.environ.get("CASEMATE_FLAGS", "")
    flow.run_flow(_recipe_of_job(), force=force, until=stage)


def _recipe_of_job() -> Any:
    from pipelines.recipe import load as recipe

    return recipe.loads(os.environ["CASEMATE_RECIPE"], source="submitted recipe")
