"""Submitted flows as a cluster knows them: jobs, progress, logs; no storage is read."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ray.job_submission import JobDetails, JobSubmissionClient

from components.core.errors import CasemateError
from pipelines.runtime.progress import parse_line

FLOW_KEY, STAGE_KEY = "casemate.flow", "casemate.stage"  # of a job's metadata
CONTROLLER = "flow"  # the stage of the job that starts the others
REFUSED = 78  # exit code of a job whose input is bad (EX_CONFIG): it is not tried again.
# Not 2: other programs and libraries end with 2 as well.
PAUSE = 2.0  # seconds between two looks at a cluster


@dataclass(frozen=True, slots=True)
class FlowJob:
    """A submitted flow or one of its stages."""

    flow: str
    stage: str
    job_id: str
    status: str
    message: str
    started: float
    exit_code: int | None = None

    @property
    def active(self) -> bool:
        return self.status in ("PENDING", "RUNNING")

    @property
    def code(self) -> int:
        """The exit code of a command that followed this job to its end."""
        return 0 if self.status == "SUCCEEDED" else 2 if self.exit_code == REFUSED else 1


def flow_jobs(client: JobSubmissionClient, flow: str | None = None) -> list[FlowJob]:
    """Jobs of one flow or of all, oldest first."""
    jobs = [_flow_job(job) for job in client.list_jobs() if FLOW_KEY in (job.metadata or {})]
    return sorted((j for j in jobs if flow in (None, j.flow)), key=lambda job: job.started)


def _flow_job(job: JobDetails) -> FlowJob:
    tags = job.metadata or {}
    message = (job.message or "").strip().splitlines()
    return FlowJob(
        tags[FLOW_KEY],
        tags[STAGE_KEY],
        job.submission_id or "",
        str(job.status.value),
        message[0] if message else "",
        (job.start_time or 0) / 1000,
        job.driver_exit_code,
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
    for job in sorted(jobs, key=lambda job: job.stage != CONTROLLER):
        client.stop_job(job.job_id)
    deadline = time.monotonic() + timeout
    while any(not client.get_job_status(job.job_id).is_terminal() for job in jobs):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} does not stop within {timeout:.0f} s")
        time.sleep(0.5)
    return jobs


def logs(
    client: JobSubmissionClient, name: str, *, stage: str | None, follow: bool = False
) -> Iterator[tuple[str, str]]:
    """(job id, text) of every job of a flow, or of one stage; `follow`: as it is written."""
    shown: dict[str, int] = {}  # characters of each job's log
    ended: set[str] = set()  # jobs whose log was read to its end
    while True:
        jobs = find_flow(client, name)
        for job in jobs:
            if stage not in (None, job.stage) or job.job_id in ended:
                continue
            text = client.get_job_logs(job.job_id)
            if not follow or len(text) > shown.get(job.job_id, 0):
                yield job.job_id, text[shown.get(job.job_id, 0) :]
            shown[job.job_id] = len(text)
            if not job.active:
                ended.add(job.job_id)
        if not follow or not any(job.active for job in jobs):
            break
        time.sleep(PAUSE)
    if not shown:
        known = ", ".join(dict.fromkeys(job.stage for job in jobs))
        raise CasemateError("--stage", stage, f"has no job in {name}; it has: {known}")


def progress_of(text: str) -> list[dict[str, Any]]:
    """The last progress of every step in a job's log; only unfinished steps if there are any."""
    found: dict[str, dict[str, Any]] = {}
    for latest in filter(None, map(parse_line, text.splitlines())):
        step = str(latest["step"])
        found.pop(step, None)  # the latest line comes last
        found[step] = latest
    unfinished = [entry for entry in found.values() if entry["done"] < entry["total"]]
    return unfinished or list(found.values())[-1:]


def in_words(progress: Mapping[str, Any]) -> str:
    """`certify.l2 120/400 items, 3.4/s, 1 min 22 s left, 2 failures`."""
    done, total = (f"{progress[key]:.1f}".removesuffix(".0") for key in ("done", "total"))
    parts = [f"{progress['step']} {done}/{total} {progress['unit']}"]
    if progress["rate"]:
        parts.append(f"{progress['rate']:g}/s")
    if progress["eta_seconds"] is not None:
        parts.append(f"{_duration(progress['eta_seconds'])} left")
    parts.append(f"{progress['failures']:.0f} failures")
    if progress["waiting_seconds"]:
        parts.append(f"waiting for workers for {_duration(progress['waiting_seconds'])}")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def with_progress(client: JobSubmissionClient, job: FlowJob) -> list[dict[str, Any]]:
    """The progress of a running stage; other jobs have none."""
    if job.status != "RUNNING" or job.stage == CONTROLLER:
        return []
    return progress_of(client.get_job_logs(job.job_id))


def watch(client: JobSubmissionClient, controller: FlowJob) -> Iterator[tuple[FlowJob, str]]:
    """(job, what is new about it) until the controller has ended; its end is the last entry."""
    seen: dict[str, str] = {}
    while True:
        known = flow_jobs(client, controller.flow)
        jobs = [job for job in known if job.active or job.started >= controller.started]
        for job in jobs:
            words = "; ".join(in_words(entry) for entry in with_progress(client, job))
            state = f"{job.status:<10} {words or job.job_id}"
            ended = job.job_id == controller.job_id and not job.active
            if seen.get(job.job_id) != state and not ended:
                seen[job.job_id] = state
                yield job, state
        latest = next(job for job in jobs if job.job_id == controller.job_id)
        if not latest.active:
            yield latest, f"{latest.status:<10} {latest.job_id}"
            return
        time.sleep(PAUSE)
