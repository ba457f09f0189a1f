"""Files, metrics and registered models of the certify stage."""

from collections.abc import Mapping
from typing import Any

from components.certify.certificate import CertificateDocument
from components.certify.claim_rows import CERTIFICATE_NAME, CERTIFICATES_NAME
from components.certify.registry import family_of
from components.certify.settings import CertificateSettings
from components.certify.vote_requests import VoteRequest
from components.certify.vote_rows import VOTES_NAME
from components.core.digests import digest_file
from components.core.files import rename
from components.core.folders import fetched
from components.data.prepared import PreparedDataset
from components.denoising.loading import folder_of
from components.models.checkpoint import read_header
from components.models.pixels import PixelModel
from pipelines.runtime.artifacts import StageDir

CHALLENGE_NAME = "challenge.json"
REFUTED_NAME = "certificate.refuted.json"


def track(out: StageDir, document: CertificateDocument, *, model: str) -> None:
    """Metrics of the certified model, the tag of soundness, and the three files."""
    prefix, found = f"certify/{out.part}", family_of(document.kind).metrics(document.summary)
    out.run.metrics(
        {f"{prefix}/{name}": value for name, value in found.items()},
        trained_in=out.trained_in(model),
    )
    out.run.tags({f"{prefix}/sound": document.sound})
    out.run.artifacts(
        *(out.path / name for name in (VOTES_NAME, CERTIFICATES_NAME, CERTIFICATE_NAME))
    )


def tag_model(out: StageDir, document: CertificateDocument, *, model: str) -> dict[str, str]:
    """Tag the certified model's version with threat, verdict and digest; returns the tags."""
    family, entries = family_of(document.kind), document.summary["certified"]
    budgets = [family.budget_text(entry) for entry in (*entries[:1], *entries[1:][-1:])]
    tags = {
        "robustness.threat": " to ".join(budgets) or str(document.threat["kind"]),
        "robustness.verdict": "certified" if document.sound else "unsound",
        "certificate.digest": digest_file(out.path / CERTIFICATE_NAME),
    }
    named = {f"{key}.{out.part}": value for key, value in tags.items()}
    out.run.model_results(out.trained_in(model), metrics={}, tags=named)
    return {**tags, "validation_status": "passed" if document.sound else "failed"}


def record_challenge(out: StageDir, result: Mapping[str, Any], *, model: str) -> None:
    """Write the outcome of the attack; a broken certified item makes the certificate invalid."""
    out.write_json(CHALLENGE_NAME, result)
    prefix = f"certify/{out.part}/challenge"
    out.run.metrics(
        {f"{prefix}/{name}": result[name]["value"] for name in ("certified", "standing")}
    )
    out.run.artifacts(out.path / CHALLENGE_NAME)
    if result["broken_certified"]:
        claim = out.path / CERTIFICATE_NAME
        rename(claim, REFUTED_NAME)  # not to be taken for valid
        tags = {f"robustness.verdict.{out.part}": "refuted"}
        out.run.model_results(out.trained_in(model), metrics={}, tags=tags)
        raise RuntimeError(
            f"{result['broken_certified']} certified item(s) of {out.step} were broken by "
            f"{result['attack']}: {', '.join(result['broken_items'])}; "
            "the certificate is wrong, do not use it"
        )


def publish(
    request: VoteRequest[CertificateSettings],
    dataset: PreparedDataset,
    document: CertificateDocument,
    out: StageDir,
    *,
    recipe: str,
    tags: Mapping[str, str],
) -> None:
    """Register the smoothed classifier that was certified, where the family has one."""
    family = family_of(request.settings.kind)
    settings = family.published_settings(request.settings, document.evidence, dataset)
    if settings is None:
        return
    assert not isinstance(request.model, PixelModel)  # stages name models by their folders
    metrics = family.metrics(document.summary)
    out.run.register_smoothed(
        name=f"{recipe}-{out.part}-smoothed",
        alias="candidate",
        classifier=fetched(request.model),
        denoiser=folder_of(request.denoiser) if request.denoiser else None,
        settings=settings,
        metadata={"digest": read_header(request.model)["digest"], "fingerprint": out.fingerprint},
        tags=tags,
        about=f"Smoothed classifier of the certificate {out.part} of the recipe {recipe}: it "
        "answers with a certified radius, or abstains.",
    )
    # Under names that all certificates share: MLflow ranks the smoothed classifiers by them.
    shared = {f"certify/{name}": value for name, value in metrics.items()}
    out.run.model_results(out.run.run_id, metrics=shared, tags={})
