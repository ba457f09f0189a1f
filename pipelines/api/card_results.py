"""The finished results about one model in storages, and why some of them do not count."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.errors import CasemateError, first_line
from components.core.object_stores import is_uri
from pipelines.api.card_models import NamedModel, names_of
from pipelines.api.found_results import FoundResult, results_at
from pipelines.api.verified_results import first_problem

if TYPE_CHECKING:
    from components.report.card.evidence import Finding

UNREADABLE = (CasemateError, KeyError, TypeError, ValueError, AttributeError, OSError)


def results_of(model: NamedModel, roots: Sequence[str]) -> list[FoundResult]:
    """All results of these storages, else of the model's own; each once."""
    from pipelines.api.storages import default_storage

    places = list(roots or model.roots)
    if not places and Path(default_storage()).is_dir():
        places = [default_storage()]
    found = {result.place: result for place in places for result in results_at(place)}
    return [found[place] for place in sorted(found)]


def results_about(
    model: NamedModel, results: Sequence[FoundResult]
) -> Iterator[tuple[FoundResult, str]]:
    """The results about a model, each with the reason why it does not count, if there is one.

    One that does not verify belongs to every model that it was made from, or says it is about.
    """
    from components.report.card.evidence import STAGES
    from pipelines.stages.report.cards import concerns

    for result in results:
        if result.stage not in STAGES:
            continue
        names = names_of(model, result)
        if not names and not _mentions(result, model.digest):
            continue
        problem = first_problem(result).replace(f"{result.place}/", "")
        try:
            if problem or concerns(f"{result.stage}.", result.files, names, model.digest):
                yield result, problem
        except UNREADABLE as error:
            yield result, f"cannot be read: {first_line(error)}"


def _mentions(result: FoundResult, digest: str) -> bool:
    """Whether a result names the digest of a model itself."""
    from components.evaluate.metrics import METRICS_NAME, read_metrics

    try:
        if result.stage == "certify":
            document = json.loads((result.files / "certificate.json").read_text())
            return bool(document["evidence"]["model_digest"] == digest)
        if result.stage == "attack":
            return False
        return any(row.model_digest == digest for row in read_metrics(result.files / METRICS_NAME))
    except UNREADABLE:
        return False


def findings(model: NamedModel, own: Sequence[tuple[FoundResult, str]]) -> "list[Finding]":
    """The results as the card reads them."""
    labels = _labels([result for result, _ in own])
    return [_finding(model, result, labels[result.place], problem) for result, problem in own]


def _finding(model: NamedModel, result: FoundResult, label: str, problem: str) -> "Finding":
    from components.report.card.evidence import Finding
    from components.report.content import Fact
    from pipelines.stages.report.cards import record_of

    place = result.place if is_uri(result.place) else f"{result.flow}/{result.name}"
    command = f"casemate verify {shlex.quote(place)}" if result.stage == "certify" else ""
    names = names_of(model, result) or (model.name,)
    record = (Fact("place", place, code=True), *record_of(result.manifest))
    step = result.step if result.manifest else f"certify.{result.name}"
    return Finding(step, label, result.files, names, problem, record, command)


def _labels(results: Sequence[FoundResult]) -> dict[str, str]:
    """The shortest name of every result that no other has: step, with its flow, with its print."""
    names = {result.place: _names(result) for result in results}
    found: dict[str, str] = {}
    for place, own in names.items():
        others = [other for where, other in names.items() if where != place]
        alone = [name for i, name in enumerate(own) if all(other[i] != name for other in others)]
        found[place] = alone[0] if alone else f"{own[-1]}.{len(found)}"
    return found


def _names(result: FoundResult) -> tuple[str, ...]:
    names = (result.step, f"{result.flow}.{result.step}", f"{result.flow}.{result.name}")
    return tuple(map(file_name, names))


def file_name(name: str) -> str:
    """A name that may be part of a file's."""
    return re.sub(r"[^\w.-]", "_", name)
