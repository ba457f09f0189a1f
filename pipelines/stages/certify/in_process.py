"""A certificate in this process, without a cluster: the same votes as those of the stage."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from components.certify.certificate import CertificateDocument, check_claim, write_certificate
from components.certify.registry import family_of
from components.certify.tasks import digest_of, open_data
from components.certify.vote_requests import VotePlan, VoteRequest
from components.certify.vote_rows import VOTES_NAME
from components.certify.votes import check_can_store, write_votes
from components.core.arithmetic import EXACT, Arithmetic, use, using
from components.core.digests import digest_json
from components.core.settings import plain
from components.core.units import WorkFn
from pipelines.runtime import progress
from pipelines.runtime.provenance import software


def certify(request: VoteRequest[Any], out: Path) -> CertificateDocument:
    """Votes, certificates and certificate.json in the folder `out`."""
    settings, dataset = request.settings, open_data(request.dataset)
    family = family_of(settings.kind)
    family.check_model(request, dataset)
    with like_a_worker():
        task = family.prepare(request, source=None)
        task = family.decided(task, family.decide(task))
        use(task.votes.arithmetic)
        if notice := family.notice(task):
            progress.say(f"{request.key}: {notice}")
        header = family.header(
            task,
            dataset,
            num_items=settings.num_items,
            run_id=_run_id(request),
            software=software(),
        )
        family.check_before_votes(settings, header)
        check_can_store(header)
        if hopeless := family.unprovable(settings, header):
            progress.say(f"{request.key}: {hopeless}")
        plan = family.plan(task, settings, header)
        parts = _run(plan, family.worker(task), label=request.key)
    out.mkdir(parents=True, exist_ok=True)
    votes = write_votes(out / VOTES_NAME, plan.votes(parts.values()), header.to_dict())
    return write_certificate(out, votes, check_claim(votes.header, family.claim_of(settings)))


def _run_id(request: VoteRequest[Any]) -> str:
    """A digest of everything that is asked for: the same request gives the same bytes."""
    return digest_json(
        {
            "certify": plain(request.settings),
            "seed": request.seed,
            "model": digest_of(request.model),
            "dataset": open_data(request.dataset).digest,
        }
    )


def _run(plan: VotePlan, work: WorkFn, *, label: str) -> dict[str, pa.Table]:
    """The results of all units of a plan, and of those that its source asks for."""
    parts: dict[str, pa.Table] = {}
    todo, source = deque(plan.units), plan.source
    total, unit = (
        (source.total, source.counts) if source else (sum(u.num_items for u in todo), "items")
    )
    with progress.bar(label, total=total, unit=unit) as bar:
        while todo or (source and (todo := deque(source.next(1, ahead=1)))):
            one = todo.popleft()
            parts[one.name] = work(one.payload)
            if source is None:
                bar.advance(one.num_items)
            else:
                source.keep(one, source.brief and source.brief(parts[one.name]))
                source.show(bar)
    return parts


@contextmanager
def like_a_worker(arithmetic: Arithmetic = EXACT) -> Iterator[None]:
    """torch computes as in a certification worker with one CPU: votes are equal to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with using(arithmetic):
            yield
    finally:
        torch.set_num_threads(before)
