"""Submits flows by the Ray Jobs API: a light controller job, one job per stage.

The controller holds no state: it reads which jobs exist, so it can be killed and submitted again at
any moment. A stage that still runs is joined, a finished one is skipped by its own fingerprints.
"""

import os
import shlex
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ray.job_submission import JobStatus, JobSubmissionClient

from components.core.digests import digest_json
from components.core.user_code import digests
from pipelines.recipe.credentials import refuse_credentials_in_job
from pipelines.recipe.paths import refuse_relative, with_paths_of
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.cluster import revision_env
from pipelines.runtime.flows import (
    CONTROLLER,
    FLOW_KEY,
    PAUSE,
    REFUSED,
    STAGE_KEY,
    FlowJob,
    flow_jobs,
)
from pipelines.runtime.forwarding import (
    FLAGS_ENV,
    FORWARD_ENV,
    OWN_ENV,
    RECIPE_ENV,
    packed,
    values_of,
)
from pipelines.runtime.job_client import PatientClient, Say, connect
from pipelines.runtime.shipping import code_env
from pipelines.runtime.worker_env import WORKER_ENV

FORCE, PARALLEL = "--force", "--parallel"  # flags of a flow
MAX_TRIES = 3
START_SECONDS = 60.0
TAIL = 15  # lines of a failed stage's log


def flow_name(recipe: Recipe, storage: str) -> str:
    """The same recipe into the same storage is the same flow."""
    return f"{recipe.name}-{digest_json([recipe.digest(), storage])[:8]}"


def submit(
    recipe: Recipe,
    *,
    address: str,
    flags: Collection[str] = (),
    python: str | None = None,
    env: Sequence[str] = (),
    say: Say = lambda _: None,
) -> FlowJob:
    """Submit the controller; a flow that already runs is returned instead of doubled.

    `env` names variables of this process that the flow's jobs get. Relative paths are resolved if
    the cluster is this machine, else refused.
    """
    client, recipe, interpreter = settled(recipe, address=address, python=python, say=say)
    env_vars = job_env(recipe, env=env, flags=flags)
    name = flow_name(recipe, recipe.storage.root)
    jobs = [job for job in flow_jobs(client, name) if job.stage == CONTROLLER]
    if running := [job for job in jobs if job.active]:
        say(f"{name} runs already: job {running[-1].job_id}, with the options it was started with")
        return running[-1]
    job_id = submit_job(
        client,
        f"{interpreter} -m pipelines.cli control",
        job_id=f"{name}-{1 + len(jobs)}",
        tags={FLOW_KEY: name, STAGE_KEY: CONTROLLER},
        env=env_vars,
        user_code=digests(recipe.resolved()),
    )
    return next(job for job in flow_jobs(client, name) if job.job_id == job_id)


def settled(
    recipe: Recipe, *, address: str, python: str | None, say: Say = lambda _: None
) -> tuple[PatientClient, Recipe, str]:
    """A client, the recipe as the cluster can read it, and the interpreter there."""
    refuse_credentials_in_job(recipe)
    client = connect(address, say=say)
    if here := is_this_machine(client, address):
        recipe = with_paths_of(recipe, Path.cwd())
    else:
        refuse_relative(recipe)
    interpreter = python or (sys.executable if here else "python")  # `python` is the head's PATH
    return client, recipe, shlex.quote(interpreter)


def job_env(recipe: Recipe, *, env: Sequence[str], flags: Collection[str] = ()) -> dict[str, str]:
    """The environment of a flow's jobs as Ray shows it: of what is forwarded, the names alone."""
    return {
        **WORKER_ENV,
        **revision_env(),
        RECIPE_ENV: recipe.to_yaml(),
        FLAGS_ENV: " ".join(flags),
        FORWARD_ENV: " ".join(values_of(env, reserved=WORKER_ENV)),
        "RAY_AUTH_MODE": os.environ["RAY_AUTH_MODE"],
    }


def is_this_machine(client: PatientClient, address: str) -> bool:
    """Whether this machine is the whole cluster; a tunnel from localhost does not make it so."""
    names = client.hostnames()
    local = urlsplit(address).hostname in ("127.0.0.1", "localhost", "::1")
    return names == {socket.gethostname()} or (local and not names)


def submit_job(
    client: JobSubmissionClient,
    command: str,
    *,
    job_id: str,
    user_code: Sequence[str],
    env: Mapping[str, str],
    tags: Mapping[str, str],
) -> str:
    """Submit a light job; a cluster that has only just started gets a minute to be ready.

    What `env` names as forwarded is read from this process.
    """
    forwarded = values_of(env.get(FORWARD_ENV, "").split(), reserved=WORKER_ENV)
    further = [packed(forwarded)] if forwarded else []
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return str(
                client.submit_job(
                    entrypoint=command,
                    submission_id=job_id,
                    entrypoint_num_cpus=0,
                    metadata=dict(tags),
                    runtime_env={"env_vars": dict(env), **code_env(user_code, further=further)},
                )
            )
        except RuntimeError as error:
            if "already exists" in str(error):  # the answer to an earlier try was lost
                return job_id
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1)


class StageFailedError(RuntimeError):
    """A stage that ended and is not tried again; `refused`: for bad input."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


class Controller:
    """Runs the stages of a flow as jobs, each after the stages it needs.

    One stage at a time; in `parallel` all whose needs are met. A stage whose machine failed is
    tried again, one whose input is bad is not. After a failure no stage is started; those that run
    are left to finish, since their work stays.
    """

    def __init__(
        self,
        client: JobSubmissionClient,
        flow: str,
        needs: Mapping[str, Collection[str]],
        *,
        user_code: Sequence[str] = (),
        parallel: bool = False,
        say: Say,
    ) -> None:
        self.client, self.flow, self.needs, self.say = client, flow, needs, say
        self.user_code, self.parallel = user_code, parallel
        self.waiting = list(needs)
        self.running: dict[str, str] = {}  # stage -> job id
        self.done: set[str] = set()
        self.num_failed = dict.fromkeys(needs, 0)
        self.failure: StageFailedError | None = None

    def run(self) -> None:
        """Run every stage; raises the first failure when nothing runs any more."""
        while True:
            self._start_ready()
            if not self.running:
                break
            time.sleep(PAUSE / 2)
            for stage, job_id in list(self.running.items()):
                self._look_at(stage, job_id)
        if self.failure:
            raise self.failure
        assert not self.waiting, f"stages that wait for each other: {self.waiting}"

    def _start_ready(self) -> None:
        for stage in list(self.waiting):
            busy = self.running and not self.parallel
            if self.failure or busy or not self.done.issuperset(self.needs[stage]):
                continue
            self.waiting.remove(stage)
            self.running[stage] = self._join_or_submit(stage)
            self.say(f"{stage}: job {self.running[stage]}")

    def _look_at(self, stage: str, job_id: str) -> None:
        info = self.client.get_job_info(job_id)
        if not info.status.is_terminal():
            return
        del self.running[stage]
        if info.status == JobStatus.SUCCEEDED:
            self.done.add(stage)
            return
        self.num_failed[stage] += 1
        refused = info.driver_exit_code == REFUSED
        final = refused or info.status == JobStatus.STOPPED or self.num_failed[stage] == MAX_TRIES
        self.say("\n".join(self.client.get_job_logs(job_id).strip().splitlines()[-TAIL:]))
        if not final:
            code = info.driver_exit_code
            how = "was killed" if code is None or code < 0 else f"ended with code {code}"
            self.say(f"{stage}: attempt {self.num_failed[stage]} {how}, trying again")
            self.waiting.insert(0, stage)
        elif not self.failure:
            message = f"stage {stage} ended {info.status.value}, see job {job_id}"
            self.failure = StageFailedError(message, refused=refused)

    def _join_or_submit(self, stage: str) -> str:
        jobs = [job for job in flow_jobs(self.client, self.flow) if job.stage == stage]
        if running := [job for job in jobs if job.active]:
            return running[-1].job_id
        own = {key: os.environ[key] for key in OWN_ENV if key in os.environ}
        return submit_job(
            self.client,
            f"{shlex.quote(sys.executable)} -m pipelines.cli stage-job {stage}",
            job_id=f"{self.flow}-{stage}-{len(jobs) + 1}",
            tags={FLOW_KEY: self.flow, STAGE_KEY: stage},
            env={**WORKER_ENV, **own},
            user_code=self.user_code,
        )


def control(recipe: Recipe, needs: Mapping[str, Collection[str]], *, say: Say) -> None:
    """The controller's work, inside its job."""
    Controller(
        connect(None, say=say),
        flow_name(recipe, recipe.storage.root),
        needs,
        user_code=digests(recipe.resolved()),
        parallel=PARALLEL in os.environ.get(FLAGS_ENV, "").split(),
        say=say,
    ).run()
