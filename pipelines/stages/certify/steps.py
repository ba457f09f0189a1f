"""What the plan says about certificates: a step for each, and the headline figures of one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from components.certify.l2.settings import GaussianSettings
from components.certify.settings import CertificateSettings
from components.core.settings import changed_fields, plain
from components.denoising.settings import is_on_disk
from pipelines.stages.registry import DATASET, Headline, Planning, Step, headline, model_step

L2_BOUND_VERSION = 2  # of l2 certificates alone: patch certificates do not follow from that bound
# Keys that came later: see `_certify_identity`.
LATER_KEYS = (
    *("token_policy", "allow_token_mismatch", "second_rule", "delta_rule", "stop_early"),
    *("precision", "compiled", "sweep", "denoiser", "sampler"),
)


def steps(planning: Planning) -> list[Step]:
    """A step for each certificate, after the denoiser on disk that it names."""
    recipe = planning.recipe
    found: list[Step] = []
    for name, entry in recipe.certificates().items():
        section = entry.section
        needs = [DATASET, model_step(recipe, section.model)]
        if entry.finer:
            needs.append(f"certify.{entry.finer}")
        if behind := recipe.certified_behind(section):
            needs.append(f"train.{behind}")
        elif source := _denoiser_on_disk(section):
            folder = Path(source.partition(":")[2]).expanduser().absolute()
            digest = _source_digest(source)
            found.append(Step("denoiser", name, identity={"digest": digest}, given=folder))
            needs.append(found[-1].name)
        identity = {"certify": _certify_identity(section), "seed": recipe.seed}
        found.append(Step("certify", name, tuple(needs), identity))
    return found


def _certify_identity(section: CertificateSettings) -> dict[str, object]:
    """The certify section; keys that came later count only where they are used.

    Certificates made before those keys existed keep their fingerprints, and so their bytes.
    """
    from components.core.seeding import noise_impl

    values, used = plain(section), changed_fields(section)
    if source := _denoiser_on_disk(section):
        values["denoiser"] = _source_digest(source)
    if isinstance(section, GaussianSettings):
        values["bound"] = L2_BOUND_VERSION
        if section.method != "fixed":  # whose draws are as they were from the start
            values["noise_impl"] = noise_impl(section.method)
    return {key: value for key, value in values.items() if key not in LATER_KEYS or key in used}


def _denoiser_on_disk(section: CertificateSettings) -> str | None:
    """The folder of a denoiser that a certificate names, with the prefix of its format."""
    named = section.denoiser_name
    return named if named is not None and is_on_disk(named) else None


def _source_digest(source: str) -> str:
    """The content of a denoiser on disk."""
    from components.denoising.loading import source_digest

    return source_digest(source)


def headlines(steps: Sequence[tuple[Step, Path | None]]) -> list[Headline]:
    """Accuracy of each smoothed classifier, and its certified accuracies."""
    models = [_model_of(step) for step, _ in steps]
    rows: list[Headline] = []
    for (step, folder), model in zip(steps, models, strict=True):
        if folder:
            which = f", {step.part}" if models.count(model) > 1 else ""
            rows += _headlines(folder, model, which)
    return rows


def _model_of(step: Step) -> str:
    certify = step.identity["certify"]
    assert isinstance(certify, Mapping)
    return str(certify["model"])


def _headlines(folder: Path, model: str, which: str) -> list[Headline]:
    """The rows of one certificate; `which` names it where a model has several."""
    document = json.loads((folder / "certificate.json").read_text())
    summary = document["summary"]
    rows = [headline(f"smoothed, clean{which}", model, summary["standard_accuracy"])]
    if label := summary.get("prediction_accuracy"):
        rows.append(headline(f"smoothed, label alone{which}", model, label))
    doubt = which if document["sound"] else f"{which} (not sound)"
    for entry in summary["certified"]:
        at = f"l2 {entry['radius']:g}" if "radius" in entry else f"patch {entry['patch_size']}px"
        rows.append(headline(f"certified {at}{doubt}", model, entry["accuracy"]))
    return rows
