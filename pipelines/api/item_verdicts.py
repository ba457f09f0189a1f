"""Verdicts per item of finished results: what `compare` pairs, under the names of `figures`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from components.core.errors import CasemateError
from components.core.folders import within
from components.evaluate.verdicts import Kind, Verdicts, in_order
from pipelines.api.figures import Figure, budget_text, figures_of, read_json, row_figure
from pipelines.api.found_results import FoundResult
from pipelines.api.verified_results import first_problem

if TYPE_CHECKING:
    import pandas as pd

    from components.evaluate.metrics import MetricRow

KINDS: dict[str, Kind] = {"robust": "attacked", "certified": "proven"}  # others are measured
ROUNDING = 1e-9  # of a stored share against that of its rows
SHIFTED = "shifted"
SUBSTITUTED = ("train.", "model.")  # inputs that are models


@dataclass(frozen=True)
class ModelVerdicts:
    """Verdicts with the model that they are about."""

    model: str  # its name in the flow
    digest: str
    verdicts: Verdicts
    architecture: str = ""  # where the model's folder is still there


def verdicts_of(result: FoundResult) -> list[ModelVerdicts]:
    """All verdicts of one result; a result that does not verify is refused, figure by figure."""
    read = READERS.get(result.stage)
    if read is None:
        return []
    source, problem = _Source(result), first_problem(result)
    if problem:
        return list(_refused(source, problem))
    figures = figures_of(result)
    try:
        return [source.described(found) for found in read(source, figures)]
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        remedy = f"cannot be read as a result ({type(error).__name__}: {error})"
        raise CasemateError("path", result.place, remedy) from error


def is_about(result: FoundResult, digest: str) -> bool:
    """Whether a result has figures of the model with this digest."""
    if result.stage not in READERS:
        return False
    source = _Source(result)
    try:
        return any(source.digest_of(figure) == digest for figure in figures_of(result))
    except CasemateError:  # it cannot be read, and is refused if it was made from this model
        return digest in source.models.values()


def dataset_of(result: FoundResult) -> Mapping[str, Any]:
    """dataset.json of what a result is about; empty where that is not there."""
    return _Source(result).dataset


def models_of(result: FoundResult) -> dict[str, str]:
    """Digests of the models that a result was made from, by name."""
    return _Source(result).models


def _refused(source: "_Source", problem: str) -> Iterator[ModelVerdicts]:
    """Figures without verdicts: rows that do not verify are not read.

    Where even the figures cannot be read, the step stands for them, of each model it was made from.
    """
    result = source.result
    try:
        about = [(figure, source.digest_of(figure)) for figure in figures_of(result)]
    except CasemateError:
        whole = Figure(result.step, None, Fraction(0), None, None, result)
        known = source.models or {result.name: ""}
        about = [(replace(whole, model=name), digest) for name, digest in known.items()]
    for figure, digest in about:
        empty = source.verdicts(figure, [], [], np.zeros(0, np.bool_), conditions={})
        named = figure.model or source.name_of(digest)
        yield ModelVerdicts(named, digest, replace(empty, refusal=problem))


@dataclass(frozen=True)
class _Source:
    """A result with the dataset and the models it was made from, where these are still there."""

    result: FoundResult

    @cached_property
    def dataset(self) -> Mapping[str, Any]:
        """dataset.json of the step's input; empty where that is not there."""
        from components.data.stream import read_document
        from pipelines.runtime.storage import input_of

        folders = self.result.manifest.input_folders if self.result.manifest else {}
        with suppress(CasemateError, OSError):
            if "prepare" in folders:
                place = input_of(self.result.files, folders["prepare"])
                document: dict[str, Any] = read_document(place / "dataset.json")
                return document
        return {}

    @property
    def prepared(self) -> str:
        inputs = self.result.manifest.inputs if self.result.manifest else {}
        return inputs["prepare"]["content"] if "prepare" in inputs else ""

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How images became what models see, as conditions of a comparison."""
        if not self.dataset:
            return {}
        own, source = self.dataset, self.dataset.get("source", {})
        size = f"{own['channels']}x{own['height']}x{own['width']}"
        fitted = {f"preprocessing, {name}": source.get(name) for name in ("fit", "resize")}
        return {"preprocessing, image size": size, **fitted}

    @cached_property
    def headers(self) -> dict[str, dict[str, Any]]:
        """model.json of the step's models by the names of inputs; {} of one that is not there."""
        from components.models.checkpoint import read_header
        from pipelines.runtime.storage import input_of

        manifest = self.result.manifest
        found: dict[str, dict[str, Any]] = {}
        for name, relative in (manifest.input_folders if manifest else {}).items():
            if not name.startswith(SUBSTITUTED):
                continue
            found[name] = {}
            with suppress(CasemateError, OSError):
                place = input_of(self.result.files, relative)
                folder = within(place, "model") if name.startswith("train.") else place
                found[name] = read_header(folder)
        return found

    @cached_property
    def models(self) -> dict[str, str]:
        """Digests of the step's models by name; of one that is not there, a digest of its files."""
        inputs = self.result.manifest.inputs if self.result.manifest else {}
        digests = {}
        for name, header in self.headers.items():
            files = inputs[name]["content"] if name in inputs else ""
            digests[name.partition(".")[2]] = str(header.get("digest", files))
        return digests

    def described(self, found: ModelVerdicts) -> ModelVerdicts:
        """Verdicts with the architecture of their model."""
        known = (h for h in self.headers.values() if h.get("digest") == found.digest)
        spec = next(known, {}).get("spec", {})
        return replace(found, architecture=str(spec.get("architecture", "")))

    def digest_of(self, figure: Figure) -> str:
        """The digest of the model of a figure; where it is unknown, a name of its own."""
        if self.result.stage == "certify":
            return str(read_json(self.result, "certificate.json")["evidence"]["model_digest"])
        return self.models.get(figure.model, "") or f"{self.result.place} {figure.model}"

    def name_of(self, digest: str) -> str:
        """The name of a model in its flow, or the beginning of its digest."""
        return next((name for name, own in self.models.items() if own == digest), digest[:12])

    def table(self, name: str) -> "pd.DataFrame":
        from components.core.tables import read_table

        found: pd.DataFrame = read_table(self.result.files / name).to_pandas()
        return found

    def verdicts(
        self,
        figure: Figure,
        item_ids: Any,
        labels: Any,
        correct: Any,
        *,
        dataset: str = "",
        conditions: Mapping[str, Any],
        **fields: Any,
    ) -> Verdicts:
        """Verdicts about one figure; its stored share must be that of the rows."""
        ids, (label_list, correct_list) = in_order(list(item_ids), list(labels), list(correct))
        verdicts = np.asarray(correct_list, dtype=np.asarray(correct).dtype)
        if len(verdicts) and abs(float(verdicts.mean()) - float(figure.value)) > ROUNDING:
            remedy = f"rows give {float(verdicts.mean()):g}, not {float(figure.value):g}"
            fields = {"refusal": f"does not verify: {figure.name}: {remedy}", **fields}
        own: dict[str, Any] = {
            "base": figure.base,
            "budget": "" if figure.budget is None else budget_text(figure.budget),
            "kind": KINDS.get(figure.base.partition(".")[0], "measured"),
            "item_ids": ids,
            "labels": tuple(label_list),
            "correct": verdicts,
            "dataset": dataset or str(self.dataset.get("digest", "")),
            "prepared": self.prepared,
            "conditions": {**self.preprocessing, **conditions},
            "step": self.result.step,
            "place": self.result.place,
        }
        return Verdicts(**(own | fields))


# -- attacks


def _attacked(source: _Source, figures: list[Figure]) -> Iterator[ModelVerdicts]:
    table = source.table("attacks.parquet")
    summary = read_json(source.result, "summary.json")
    settings = summary["settings"]
    surrogate = settings.get("surrogate")
    attacks: dict[str, Any] = {"attacks": settings["attacks"]}
    if surrogate:
        attacks["surrogate"] = source.models.get(surrogate, surrogate)[:12]
    precision = summary["threat"].get("precision")
    reduced = {"precision": precision} if precision else {}
    for figure in figures:
        rows = table[table["model"] == figure.model]
        correct = rows["clean_prediction"] == rows["label"]
        is_robust = figure.base.startswith("robust.")
        if is_robust:
            correct &= rows["adversarial_prediction"] == rows["label"]
        verdicts = source.verdicts(
            figure,
            rows["item_id"],
            rows["label"],
            correct.to_numpy(),
            conditions={**reduced, **(attacks if is_robust else {})},
            doubt=_suspicion(summary, figure) if is_robust else "",
        )
        yield ModelVerdicts(figure.model, source.digest_of(figure), verdicts)


def _suspicion(summary: Mapping[str, Any], figure: Figure) -> str:
    if figure.doubt:
        return figure.doubt.replace("the attack is ", "", 1)
    return "" if summary["models"][figure.model].get("sanity") else "unchecked attack"


# -- certificates


def _certified(source: _Source, figures: list[Figure]) -> Iterator[ModelVerdicts]:
    from components.certify.certificate import CertificateDocument
    from components.certify.registry import family_of
    from components.core.tables import read_table

    document = CertificateDocument.from_dict(read_json(source.result, "certificate.json"))
    family, header = family_of(document.kind), document.evidence
    columns = read_table(source.result.files / "certificates.parquet").to_pydict()
    correct = np.asarray(columns["correct"], dtype=np.bool_)
    _, (images,) = in_order(columns["item_id"], columns["image_sha256"])
    radii = np.where(correct, columns["radius"], -1.0) if "radius" in columns else None
    shape = header.image
    size = f"{shape.channels}x{shape.height}x{shape.width}"
    asked = family.compared_under(header, document.claim)
    conditions = {"preprocessing, image size": size, **asked}
    rule = document.claim.get("rule")
    defence = family.vote_words(header) + (f", rule {rule}" if rule else "")
    for figure in figures:
        verdicts = correct
        if figure.budget is not None:
            parts = figure.base.split(".")
            second = parts[2] if len(parts) > 2 else ""
            verdicts = correct & family.proven_at(columns, figure.budget, rule=second)
        yield ModelVerdicts(
            source.name_of(header.model_digest),
            header.model_digest,
            source.verdicts(
                figure,
                columns["item_id"],
                columns["label"],
                verdicts,
                conditions=conditions,
                dataset=header.dataset_digest,
                images=tuple(images),
                radii=radii,
                defence=defence,
                refusal=f"not sound: {family.unsound_words}" if figure.doubt else "",
            ),
        )


# -- evaluations


def _evaluated(source: _Source, figures: list[Figure]) -> Iterator[ModelVerdicts]:
    from components.evaluate.metrics import METRICS_NAME, read_metrics

    rows = read_metrics(source.result.files / METRICS_NAME)
    read = SUITES.get(rows[0].suite) if rows else None
    if read is None or not (source.result.files / "predictions.parquet").is_file():
        return
    table = source.table("predictions.parquet")
    for model, own in table.groupby("model"):
        subject = next(row for row in rows if row.model == model)
        of_model = [row for row in rows if row.model == model]
        mine = [figure for figure in figures if figure.model == model]
        for verdicts in read(source, own, mine, of_model):
            yield ModelVerdicts(str(model), subject.model_digest, verdicts)


SuiteReader = Callable[
    [_Source, "pd.DataFrame", list[Figure], "list[MetricRow]"], Iterator[Verdicts]
]


def _one_row_per_item(truth: str, verdict: "Callable[[pd.DataFrame], pd.Series]") -> SuiteReader:
    """A reader of suites with one row per item: its true class, and whether it counts as right."""

    def read(
        source: _Source, table: "pd.DataFrame", figures: list[Figure], rows: "list[MetricRow]"
    ) -> Iterator[Verdicts]:
        correct = verdict(table).to_numpy(dtype=bool)
        for figure in figures:
            yield _suite_verdicts(source, figure, table, table[truth], correct, rows[0])

    return read


def _shifts(
    source: _Source, table: "pd.DataFrame", figures: list[Figure], rows: "list[MetricRow]"
) -> Iterator[Verdicts]:
    columns = {"masked": "masked_prediction", "unmasked": "prediction"}
    for figure in figures:
        name, _, metric = figure.base.removeprefix("shifts.").rpartition(".")
        own = table[(table["shift"] == name) & (table["images"] == SHIFTED)]
        correct = (own[columns[metric]] == own["label"]).to_numpy()
        about = next(row for row in rows if row.item == name)
        yield _suite_verdicts(source, figure, own, own["label"], correct, about)


def _corruptions(
    source: _Source, table: "pd.DataFrame", figures: list[Figure], rows: "list[MetricRow]"
) -> Iterator[Verdicts]:
    """Means over variants, then every variant on its own."""
    from components.evaluate.corruptions import variants_of_score

    table = table.assign(correct=table["prediction"] == table["label"])
    for figure in figures:
        wanted = variants_of_score(figure.base.removeprefix("corruptions."))
        about = next(row for row in rows if row.metric == figure.base.rpartition(".")[2])
        if wanted is not None:
            keys = table[["corruption", "severity"]].apply(tuple, axis=1)
            own = table[keys.isin(wanted)].groupby("item_id", as_index=False)
            items = own.agg(label=("label", "first"), correct=("correct", "mean"))
            if (own.size()["size"] == len(wanted)).all():  # every item in every variant
                shares = items["correct"].to_numpy(dtype=np.float64)
                yield _corrupted(source, figure, items, shares, about)
    for about in rows:
        if about.metric != "accuracy" or about.value is None:
            continue
        part = table[(table["corruption"] == about.item) & (table["severity"] == about.level)]
        figure = row_figure(source.result, f"corruptions.{about.item}", about)
        correct = part["correct"].to_numpy(dtype=bool)
        yield replace(_corrupted(source, figure, part, correct, about), is_part=True)


def _corrupted(
    source: _Source, figure: Figure, table: "pd.DataFrame", correct: Any, about: "MetricRow"
) -> Verdicts:
    """Images depend on the seed, on the fidelity and on what the flags say, such as textures."""
    found = _suite_verdicts(source, figure, table, table["label"], correct, about)
    seen = {"fidelity": about.fidelity, "seed": about.seed, "flags": list(about.flags)}
    return replace(found, conditions={**found.conditions, **seen})


def _suite_verdicts(
    source: _Source,
    figure: Figure,
    table: "pd.DataFrame",
    labels: Any,
    correct: Any,
    about: "MetricRow",
) -> Verdicts:
    # The clean images are those of the dataset, whose preprocessing is compared anyway.
    own = {} if figure.base == "clean" else {"resize of the suite": about.resize}
    return source.verdicts(
        figure,
        table["item_id"],
        labels,
        correct,
        conditions=own,
        dataset=about.dataset_digest,
    )


SUITES: dict[str, SuiteReader] = {
    "clean": _one_row_per_item("label", lambda t: t["prediction"] == t["label"]),
    "corruptions": _corruptions,
    "shifts": _shifts,
    "shape_bias": _one_row_per_item("shape", lambda t: t["decision"] == t["shape"]),
    "spatial": _one_row_per_item("label", lambda t: t["survived"]),
}
READERS: dict[str, Callable[[_Source, list[Figure]], Iterator[ModelVerdicts]]] = {
    "attack": _attacked,
    "certify": _certified,
    "evaluate": _evaluated,
}
