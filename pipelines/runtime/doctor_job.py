"""The doctor from outside a cluster: its checks run as a job, findings come back by its log."""

import json
import secrets
import time
from collections.abc import Iterator, Sequence

from components.core.user_code import digests
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime import findings
from pipelines.runtime.findings import CODE_ENV, Finding
from pipelines.runtime.jobs import job_env, settled, submit_job
from pipelines.runtime.node_probe import ANSWER_SECONDS
from pipelines.runtime.shipping import code_digest

FINDING = "finding: "  # a line of the job's log; JSON follows
TAIL = 3  # lines of a job that broke


def diagnose_by_job(
    recipe: Recipe,
    *,
    address: str,
    python: str | None = None,
    env: Sequence[str] = (),
    timeout: float = ANSWER_SECONDS,
) -> Iterator[Finding]:
    """Check the cluster whose dashboard is at `address`; findings come as they are made."""
    client, recipe, interpreter = settled(recipe, address=address, python=python)
    job_id = submit_job(
        client,
        f"{interpreter} -m pipelines.cli doctor-job --timeout {timeout}",
        job_id=f"casemate-doctor-{secrets.token_hex(4)}",
        tags={},
        env={**job_env(recipe, env=env), CODE_ENV: code_digest()},
        user_code=digests(recipe.resolved()),
    )
    deadline, shown = time.monotonic() + 4 * timeout, 0  # MLflow, machines, clocks, start
    while True:
        ended = client.get_job_status(job_id).is_terminal()
        text = client.get_job_logs(job_id)
        lines = [line for line in text.splitlines() if line.startswith(FINDING)]
        for line in lines[shown:]:
            yield Finding(**json.loads(line.removeprefix(FINDING)))
        shown = len(lines)
        if ended:
            break
        if time.monotonic() > deadline:
            client.stop_job(job_id)
            yield findings.fail("job", f"{job_id} does not end within {4 * timeout:.0f} s")
            return
        time.sleep(1)
    info = client.get_job_info(job_id)
    if info.driver_exit_code != 0:
        why = " / ".join((text.strip() or info.message or "").splitlines()[-TAIL:])
        yield findings.fail("job", f"{job_id} ended {info.status.value}: {why}")
    client.delete_job(job_id)
