"""Commands of the Ray Jobs API: submit, status, logs, stop, and the entry points of jobs."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.core.errors import CasemateError
from pipelines import api
from pipelines.cli.flow import run_and_show
from pipelines.cli.options import Chosen, JobsOpt, JsonOpt, takes_recipe

if TYPE_CHECKING:
    from pipelines.runtime.flows import FlowJob

commands = typer.Typer()
DASHBOARD = "http://127.0.0.1:8265"
EnvOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME",
        help="Forward this variable to the flow's jobs; its value is not shown by Ray.",
    ),
]


def _note(text: str) -> None:
    print(f"casemate: {text}", file=sys.stderr, flush=True)


@commands.command(
    epilog="Example: casemate submit demo --address http://127.0.0.1:8265 --storage /shared/runs"
)
@takes_recipe
def submit(
    chosen: Chosen,
    address: JobsOpt = DASHBOARD,
    env: EnvOpt = None,
    parallel: Annotated[
        bool, typer.Option("--parallel", help="Run stages that do not need each other together.")
    ] = False,
    python: Annotated[str | None, typer.Option(help="Interpreter on the cluster.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the flow to its end.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Send a flow to a cluster: a controller job that runs every stage as its own Ray job."""
    job = api.submit(
        chosen.recipe,
        address=address,
        overrides=chosen.set_ or [],
        storage=chosen.storage,
        smoke=chosen.smoke,
        force=chosen.force,
        env=env or [],
        parallel=parallel,
        python=python,
        say=_note,
    )
    shown = {"flow": job.flow, "job": job.job_id}
    print(json.dumps(shown) if as_json else f"flow {job.flow}: job {job.job_id}", flush=True)
    if wait:
        raise typer.Exit(_follow(address, job, out=sys.stderr if as_json else sys.stdout))


def _follow(address: str, controller: "FlowJob", *, out: Any) -> int:
    """Print what happens until the flow has ended; returns its exit code."""
    from pipelines.runtime import flows
    from pipelines.runtime.job_client import connect

    client, last = connect(address, say=_note), controller
    try:
        for last, news in flows.watch(client, controller):
            print(f"{last.stage:<10} {news}", file=out, flush=True)
    except KeyboardInterrupt:
        where = "" if address == DASHBOARD else f" --address {address}"
        _note(f"{last.flow} goes on; casemate logs {last.flow}{where} -f follows it again")
        return 130
    print(client.get_job_logs(last.job_id).rstrip(), file=sys.stderr if last.code else out)
    if last.code:
        _note(f"{last.flow} ended {last.status}; the same command continues it")
    return last.code


@commands.command(epilog="Example: casemate status demo-1a2b3c4d")
def status(
    flow: Annotated[str | None, typer.Argument(help="A flow; default: all.")] = None,
    address: JobsOpt = DASHBOARD,
    as_json: JsonOpt = False,
) -> None:
    """Show flows on a cluster: stages, done and total, rate, time left, failures."""
    from pipelines.runtime import flows
    from pipelines.runtime.job_client import connect

    client = connect(address, say=_note)
    jobs = flows.find_flow(client, flow) if flow else flows.flow_jobs(client)
    rows = [(job, flows.with_progress(client, job)) for job in jobs]
    if as_json:
        print(json.dumps([{**asdict(job), "progress": entry} for job, entry in rows], indent=2))
        return
    for job, progress in rows:
        print(f"{job.flow:<28} {job.stage:<10} {job.status:<10} {job.job_id}")
        for entry in progress:
            print(f"{'':<28} {flows.in_words(entry)}")


@commands.command(epilog="Example: casemate logs demo-1a2b3c4d --stage certify -f")
def logs(
    flow: Annotated[str, typer.Argument(help="A flow or a job id.")],
    stage: Annotated[str | None, typer.Option(help="Only this stage.")] = None,
    address: JobsOpt = DASHBOARD,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as long as the flow runs.")
    ] = False,
    as_json: JsonOpt = False,
) -> None:
    """Print the logs of a flow's jobs."""
    from pipelines.runtime import flows
    from pipelines.runtime.job_client import connect

    client, shown = connect(address, say=_note), ""
    try:
        for job_id, text in flows.logs(client, flow, stage=stage, follow=follow):
            if as_json:  # one object per line: it can be followed too
                print(json.dumps({"job": job_id, "text": text}), flush=True)
                continue
            if job_id != shown:
                print(f"== {job_id}")
            shown = job_id
            print(text.rstrip("\n"), flush=True)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@commands.command(epilog="Example: casemate stop demo-1a2b3c4d")
def stop(
    flow: Annotated[str, typer.Argument(help="A flow or a job id.")],
    address: JobsOpt = DASHBOARD,
    as_json: JsonOpt = False,
) -> None:
    """Stop a flow on a cluster; finished work stays, `submit` continues it."""
    from pipelines.runtime import flows
    from pipelines.runtime.job_client import connect

    stopped = flows.stop(connect(address, say=_note), flow)
    if as_json:
        print(json.dumps([job.job_id for job in stopped], indent=2))
    elif stopped:
        print(f"stopped {len(stopped)} job(s) of {flow}; submit the recipe again to continue")
    else:
        print(f"{flow} has ended already: no job to stop")


@commands.command(hidden=True)
def control() -> None:
    """The controller job of a submitted flow."""

    def work() -> None:
        from pipelines.flow.plan import stage_needs
        from pipelines.runtime import flows, jobs

        loaded = recipe_of_job()
        try:
            jobs.control(loaded, stage_needs(loaded), say=lambda text: print(text, flush=True))
        except jobs.StageFailedError as error:
            _note(f"failed: {error}")
            raise typer.Exit(flows.REFUSED if error.refused else 1) from error
        run_and_show(loaded)  # every step is finished

    in_job(work)


@commands.command("stage-job", hidden=True)
def stage_job(stage: str) -> None:
    """One stage of a submitted flow."""

    def work() -> None:
        from pipelines.flow import run as flow

        force = "--force" in os.environ.get("CASEMATE_FLAGS", "").split()
        flow.run_flow(recipe_of_job(), force=force, until=stage)

    in_job(work)


def in_job(work: Callable[[], None]) -> None:
    """Run the work of a job; bad input gets an exit code that no other program uses."""
    from pipelines.runtime import forwarding

    try:
        forwarding.load()
        work()
    except CasemateError as error:
        from pipelines.runtime.flows import REFUSED

        _note(str(error))
        raise typer.Exit(REFUSED) from error


def recipe_of_job() -> Any:
    from pipelines.recipe import load as recipe

    return recipe.loads(os.environ["CASEMATE_RECIPE"], source="submitted recipe")
