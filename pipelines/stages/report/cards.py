"""Model cards of a flow: one per classifier, from the finished steps of the flow."""

import os
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from components.core.folders import Folder, within
from components.core.object_stores import is_uri
from components.data.prepared import PreparedDataset
from components.data.stream import read_document
from components.evaluate.metrics import METRICS_NAME, read_metrics
from components.models.checkpoint import read_header
from components.report.card.content import Card, build_card
from components.report.card.evidence import STAGES, Finding
from components.report.card.markdown import markdown
from components.report.card.page import page
from components.report.card.reading import is_denoiser, read_subject
from components.report.content import Fact
from components.report.results import read_json
from pipelines.runtime.artifacts import manifest_of
from pipelines.runtime.manifests import Manifest
from pipelines.runtime.verified_steps import first_step_problem

DESCRIPTION_LENGTH = 5000  # characters of a registered version in MLflow
MODELS = ("train", "model")  # steps that are models


@dataclass(frozen=True)
class ModelCard:
    """The card of one model, laid out when it is asked for."""

    model: str  # its name in the flow
    trained_in: str | None  # the MLflow run of its training; None: a given model
    card: Card

    @property
    def html(self) -> str:
        """One self-contained page."""
        return page(self.card)

    @property
    def markdown(self) -> str:
        """The whole card."""
        return markdown(self.card)

    @property
    def description(self) -> str:
        """The same within MLflow's limit."""
        return markdown(self.card, limit=DESCRIPTION_LENGTH)


def flow_cards(
    recipe: str, inputs: Mapping[str, Folder], *, beside: Path, recipe_text: str = ""
) -> Iterator[ModelCard]:
    """The cards of all classifiers of a flow, from the folders of its finished steps.

    `inputs`: folders by step, as the report has them; `beside`: the folder that commands start in.
    """
    results = {step: f for step, f in inputs.items() if step.partition(".")[0] in STAGES}
    problems = {step: first_step_problem(step.partition(".")[0], f) for step, f in results.items()}
    data = PreparedDataset.open(inputs["prepare"]) if "prepare" in inputs else None
    for step, folder in inputs.items():
        stage, _, name = step.partition(".")
        if stage not in MODELS:
            continue
        model = within(folder, "model") if stage == "train" else folder
        if is_denoiser(model):
            continue
        digest = str(read_header(model)["digest"])
        manifest = manifest_of(folder)
        subject = read_subject(
            name,
            model,
            facts=[Fact("Recipe", recipe), *software_facts(manifest)],
            classes=data.classes if data else (),
            origin=dataset_words(inputs["prepare"]) if data else "",
            trained_by=(step, folder) if stage == "train" else None,
        )
        found = [
            Finding(
                one,
                one,
                results[one],
                (name,),
                problems[one],
                tuple(record_of(manifest_of(results[one]))),
                _command(one, results[one], beside),
            )
            for one in results
            if (
                step in _inputs_of(results[one])
                if problems[one]
                else concerns(one, results[one], [name], digest)
            )
        ]
        card = build_card(subject, found, recipe_text=recipe_text)
        trained_in = manifest.mlflow_run_id if manifest and stage == "train" else None
        yield ModelCard(name, trained_in, card)


def _inputs_of(folder: Folder) -> Collection[str]:
    """Steps that a step was made from: what a result is about that cannot be trusted."""
    manifest = manifest_of(folder)
    return manifest.inputs if manifest else ()


def concerns(step: str, folder: Folder, names: Collection[str], digest: str) -> bool:
    """Whether a result that verifies is about a model: by its digest, or its name in the step."""
    stage = step.partition(".")[0]
    if stage == "certify":
        document = read_json(folder / "certificate.json", step=step)
        return bool(document["evidence"]["model_digest"] == digest)
    if stage == "attack":
        return not set(names).isdisjoint(read_json(folder / "summary.json", step=step)["models"])
    return any(row.model_digest == digest for row in read_metrics(folder / METRICS_NAME))


def dataset_words(prepared: Folder) -> str:
    """Name and digest of a prepared dataset."""
    document = read_document(prepared / "dataset.json")
    name = document.get("source", {}).get("name", "unnamed")
    return f"{name}, digest {str(document['digest'])[:12]}"


def software_facts(manifest: Manifest | None) -> Iterator[Fact]:
    """Code and versions that made a step."""
    if manifest and manifest.git_revision:
        yield Fact("Code", manifest.git_revision[:12])
    if manifest and manifest.software:
        shown = ("casemate", "torch", "timm")
        versions = [f"{n} {manifest.software[n]}" for n in shown if n in manifest.software]
        yield Fact("Versions", ", ".join(versions))


def record_of(manifest: Manifest | None) -> Iterator[Fact]:
    """Where a result comes from."""
    if manifest is None:
        return
    yield Fact("fingerprint", manifest.fingerprint, code=True)
    yield Fact("MLflow run", manifest.mlflow_run_id, code=True)
    if manifest.git_revision:
        yield Fact("code", manifest.git_revision, code=True)
    if data := manifest.inputs.get("prepare"):
        yield Fact("dataset content", data["content"], code=True)


def _command(step: str, folder: Folder, beside: Path) -> str:
    """The command that verifies a certificate; paths are relative, so that cards can be moved."""
    if not step.startswith("certify."):
        return ""
    place = str(folder)
    if not is_uri(place):
        place = Path(os.path.relpath(place, beside)).as_posix()
    return f"casemate verify {shlex.quote(place)}"
