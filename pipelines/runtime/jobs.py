"""Flows on a cluster by the Ray Jobs API: a light controller job, one job per stage.

The controller holds no state: it reads which jobs exist, so it can be killed and submitted again at
any moment. A stage that still runs is joined, a finished one is skipped by its own fingerprints.
"""

import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ray.dashboard.modules import dashboard_sdk
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from components.core.digests import digest_json
from components.core.errors import CasemateError, first_line
from components.core.user_code import digests
from pipelines.recipe.credentials import refuse_credentials_in_job
from pipelines.recipe.load import with_values
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.cluster import WORKER_ENV, check_reachable, code_env

RECIPE_ENV = "CASEMATE_RECIPE"  # travels with the job: the cluster need not see the client's disk
FLAGS_ENV = "CASEMATE_FLAGS"
MAX_TRIES = 3
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class FlowJob:
    """A submitted flow or one of its stages."""

    flow: str
    stage: str  # "flow" for the controller
    job_id: str
    status: str
    message: str
    started: float

    @property
    def active(self) -> bool:
        return self.status in ("PENDING", "RUNNING")


def connect(address: str | None) -> JobSubmissionClient:
    """A client of the cluster's dashboard; inside a job, of the cluster the job runs on."""
    if address is not None:
        if not address.startswith(("http://", "https://")):
            raise CasemateError(
                "--address", address, "is not an http address; write e.g. http://127.0.0.1:8265"
            )
        check_reachable(address, key="--address")
    for name in ("ray", dashboard_sdk.__name__):  # they list every file that is packed
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        remedy = f"does not accept jobs: {first_line(error)}"
        raise CasemateError("--address", address, remedy) from error


def flow_name(recipe: Recipe, storage: str) -> str:
    """The same recipe into the same storage is the same flow."""
    return f"{recipe.name}-{digest_json([recipe.digest(), storage])[:8]}"


def submit(
    recipe: Recipe, *, address: str, storage: str, force: bool = False, python: str | None = None
) -> FlowJob:
    """Submit the controller; a flow that already runs is returned instead of doubled."""
    refuse_credentials_in_job(recipe)
    client = connect(address)
    name = flow_name(recipe, storage)
    jobs = flow_jobs(client, name)
    running = [job for job in jobs if job.stage == "flow" and job.active]
    if running:
        return running[-1]
    local = urlsplit(address).hostname in ("127.0.0.1", "localhost", "::1")
    interpreter = python or (sys.executable if local else "python")  # `python` is the head's PATH
    env = {
        **WORKER_ENV,
        RECIPE_ENV: with_values(recipe, {"storage.root": storage}).to_yaml(),
        FLAGS_ENV: "--force" if force else "",
        "RAY_AUTH_MODE": os.environ["RAY_AUTH_MODE"],
    }
    attempt = 1 + sum(job.stage == "flow" for job in jobs)
    command = f"{shlex.quote(interpreter)} -m pipelines.cli control"
    job_id = _submit_job(
        client,
        command,
        job_id=f"{name}-{attempt}",
        flow=name,
        stage="flow",
        env=env,
        user_code=digests(recipe.resolved()),
    )
    return next(job for job in flow_jobs(client, name) if job.job_id == job_id)


def _submit_job(
    client: JobSubmissionClient,
    command: str,
    *,
    job_id: str,
    flow: str,
    stage: str,
    env: dict[str, str],
    user_code: Sequence[str],
) -> str:
    """Submit a light job; a cluster that has only just started gets a minute to be ready."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return str(
                client.submit_job(
                    entrypoint=command,
                    submission_id=job_id,
                    entrypoint_num_cpus=0,
                    metadata={"casemate.flow": flow, "casemate.stage": stage},
                    runtime_env={"env_vars": env, **code_env(user_code)},
                )
            )
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1)


def flow_jobs(client: JobSubmissionClient, flow: str | None = None) -> list[FlowJob]:
    """Jobs of one flow or of all, oldest first."""
    jobs = [_flow_job(job) for job in client.list_jobs() if "casemate.flow" in (job.metadata or {})]
    return sorted((j for j in jobs if flow in (None, j.flow)), key=lambda job: job.started)


def _flow_job(job: JobDetails) -> FlowJob:
    tags = job.metadata or {}
    message = (job.message or "").strip().splitlines()
    return FlowJob(
        tags["casemate.flow"],
        tags["casemate.stage"],
        job.submission_id or "",
        str(job.status.value),
        message[0] if message else "",
        (job.start_time or 0) / 1000,
    )


def find_flow(client: JobSubmissionClient, name: str) -> list[FlowJob]:
    """The jobs of a flow by its name or by the id of one of its jobs."""
    jobs = flow_jobs(client)
    flows = sorted({job.flow for job in jobs if name in (job.flow, job.job_id)})
    if not flows:
        known = ", ".join(sorted({job.flow for job in jobs})) or "none"
        raise CasemateError("flow", name, f"is not on this cluster; known: {known}")
    return [job for job in jobs if job.flow == flows[0]]


def stop(client: JobSubmissionClient, name: str, *, timeout: float = 60) -> list[FlowJob]:
    """Stop the controller first, then its stages; finished work stays on the storage."""
    jobs = [job for job in find_flow(client, name) if job.active]
    for job in sorted(jobs, key=lambda job: job.stage != "flow"):
        client.stop_job(job.job_id)
    deadline = time.monotonic() + timeout
    while any(_is_active(client, job.job_id) for job in jobs):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} does not stop within {timeout:.0f} s")
        time.sleep(0.5)
    return jobs


def logs(client: JobSubmissionClient, name: str, *, stage: str | None) -> Iterator[tuple[str, str]]:
    """(job id, text) of every job of a flow, or of one stage."""
    for job in find_flow(client, name):
        if stage in (None, job.stage):
            yield job.job_id, client.get_job_logs(job.job_id)


def control(client: JobSubmissionClient, recipe: Recipe, stages: Sequence[str], say: Any) -> None:
    """The controller's work: one stage job after the other, tried again if its machine failed."""
    name = flow_name(recipe, recipe.storage.root)
    for stage in stages:
        for attempt in range(1, MAX_TRIES + 1):
            job_id = _join_or_submit(client, name, stage, user_code=digests(recipe.resolved()))
            say(f"{stage}: job {job_id}")
            status, code = _wait(client, job_id)
            if status == JobStatus.SUCCEEDED:
                break
            if status == JobStatus.STOPPED or code == 2 or attempt == MAX_TRIES:
                say("\n".join(client.get_job_logs(job_id).strip().splitlines()[-15:]))
                raise RuntimeError(f"stage {stage} ended {status.value}, see job {job_id}")
            say(f"{stage}: attempt {attempt} failed, trying again")


def _join_or_submit(
    client: JobSubmissionClient, flow: str, stage: str, *, user_code: Sequence[str]
) -> str:
    jobs = [job for job in flow_jobs(client, flow) if job.stage == stage]
    running = [job for job in jobs if job.active]
    if running:
        return running[-1].job_id
    passed = {key: os.environ[key] for key in (RECIPE_ENV, FLAGS_ENV, "RAY_AUTH_MODE")}
    env = {**WORKER_ENV, **passed}
    command = f"{shlex.quote(sys.executable)} -m pipelines.cli stage-job {stage}"
    job_id = f"{flow}-{stage}-{len(jobs) + 1}"
    return _submit_job(
        client, command, job_id=job_id, flow=flow, stage=stage, env=env, user_code=user_code
    )


def _wait(client: JobSubmissionClient, job_id: str) -> tuple[JobStatus, int | None]:
    while True:
        info = client.get_job_info(job_id)
        if info.status.is_terminal():
            return info.status, info.driver_exit_code
        time.sleep(1)


def _is_active(client: JobSubmissionClient, job_id: str) -> bool:
    return not client.get_job_status(job_id).is_terminal()
