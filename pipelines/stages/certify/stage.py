"""Certify test items: votes (the evidence), certificates derived, then an attack on the claim."""

import json
from collections.abc import Mapping

from components.certify.certificate import check_claim, write_certificate
from components.certify.challenge import ChallengeTask
from components.certify.header import VotesHeader
from components.certify.registry import family_of
from components.certify.settings import CertificateSettings
from components.certify.tasks import VoteSettings, VoteTask, digest_of
from components.certify.vote_requests import VoteRequest
from components.certify.vote_rows import VOTES_NAME, Votes
from components.certify.votes import check_can_store, read_votes, write_votes
from components.core.digests import digest_json
from components.core.folders import Folder
from components.core.units import Unit
from components.data.prepared import PreparedDataset
from pipelines.recipe import build, denoisers
from pipelines.recipe.schema.place import ClusterSection
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.progress import say
from pipelines.runtime.provenance import software
from pipelines.runtime.shards import run_units
from pipelines.stages.certify import challenge, results
from pipelines.stages.certify.worker import make_prober, make_voter, on_device


def run(recipe: Recipe, inputs: Mapping[str, Folder], out: StageDir) -> None:
    """Collect the missing votes, derive the certificate, challenge it."""
    entry = recipe.certificates()[out.part]
    settings, dataset = entry.section, PreparedDataset.open(inputs["prepare"])
    family, request = family_of(settings.kind), _request(recipe, settings, inputs, out)
    family.check_model(request, dataset)
    source = read_votes(inputs[f"certify.{entry.finer}"] / VOTES_NAME) if entry.finer else None
    task = family.prepare(request, source=source)
    if source is None:
        task = _probed(task, recipe.cluster, out)
        if notice := family.notice(task):
            say(f"{out.step}: {notice}")
    header = family.header(
        task,
        dataset,
        num_items=settings.num_items,
        run_id=out.fingerprint,
        software=software(),
    )
    family.check_before_votes(settings, header)
    check_can_store(header)
    if hopeless := family.unprovable(settings, header):
        say(f"{out.step}: {hopeless}")
    if source is not None:
        own, rows = family.shared_votes(source, header)
        votes = write_votes(out.path / VOTES_NAME, rows, own.to_dict())
    else:
        votes = _vote(task, settings, header, out, recipe.cluster)
    claim = check_claim(votes.header, family.claim_of(settings))
    document = write_certificate(out.path, votes, claim)
    results.track(out, document, model=settings.model)
    if settings.challenge:
        attack = ChallengeTask(task, settings.challenge, claim, recipe.seed)
        found = challenge.run(attack, votes, recipe.cluster, out)
        results.record_challenge(out, found, model=settings.model)
    tags = results.tag_model(out, document, model=settings.model)
    results.publish(request, dataset, document, out, recipe=recipe.name, tags=tags)


def _request(
    recipe: Recipe, settings: CertificateSettings, inputs: Mapping[str, Folder], out: StageDir
) -> VoteRequest[CertificateSettings]:
    """The settings of the certificate with the folders of its inputs."""
    return VoteRequest(
        settings=settings,
        key=f"certify.{out.part}",
        dataset=inputs["prepare"],
        model=build.model_folder(inputs, settings.model),
        denoiser=denoisers.of_certificate(settings, out.part, inputs)
        if settings.denoiser_name
        else None,
        seed=recipe.seed,
        device=recipe.cluster.actor_device,
    )


def _probed(
    task: VoteTask[VoteSettings], cluster: ClusterSection, out: StageDir
) -> VoteTask[VoteSettings]:
    """The task with the device of a first worker, and what the family decides there.

    A unit of work: the driver may have no GPU. Kept, so that a resumed step decides nothing anew.
    """
    family, device = family_of(task.votes.kind), task.votes.device
    if device == "cpu" and not family.must_decide(task):
        out.run.tags({"casemate.device": device})
        return task
    made_with = [out.fingerprint, task.votes.to_dict(), digest_of(task.model), software()]
    made_with += [sorted(task.votes.undecided)] if task.votes.undecided else []
    parts = out.parts("probe", run_id=digest_json(made_with))
    unit = Unit(f"probe-{parts.run_id[:12]}", "the first worker", None)
    run_units(
        [unit],
        make=make_prober,
        config=task,
        parts=parts,
        cluster=cluster,
        label=f"{out.step} probe",
    )
    (found,) = parts.load(unit.name).to_pylist()
    out.run.tags({"casemate.device": found["name"]})
    return family.decided(on_device(task, found["device"]), json.loads(found["decisions"]))


def _vote(
    task: VoteTask[VoteSettings],
    settings: CertificateSettings,
    header: VotesHeader,
    out: StageDir,
    cluster: ClusterSection,
) -> Votes:
    """Compute the votes that are missing, on the cluster; keep them all in one file."""
    plan = family_of(header.kind).plan(task, settings, header)
    parts = out.parts("votes", run_id=digest_json(header.to_dict()))
    run_units(
        plan.units,
        make=make_voter,
        config=task,
        parts=parts,
        cluster=cluster,
        source=plan.source,
        out=out,
    )
    tables = (table for _, table in parts.all_tables())
    return write_votes(out.path / VOTES_NAME, plan.votes(tables), header.to_dict())
