"""Model cards: all finished results about a model that verify, on one page."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from components.core.object_stores import is_uri
from pipelines.api.found_results import FoundResult
from pipelines.api.outputs import OUT, output_file_or_folder
from pipelines.api.tables import frame

if TYPE_CHECKING:
    import pandas as pd

    from components.report.card.content import Card as Content
    from components.report.card.evidence import Subject
    from components.report.card.figures import Figure
    from pipelines.api.card_models import NamedModel

HTML, MARKDOWN = ".html", ".md"


@dataclass(frozen=True)
class Card:
    """The card of one model."""

    model: "NamedModel"
    content: "Content"
    published: str = ""  # the registered version that it describes
    files: tuple[Path, ...] = ()

    @property
    def html(self) -> str:
        """One self-contained page."""
        from components.report.card.page import page

        return page(self.content)

    @property
    def markdown(self) -> str:
        """The card as Markdown, without charts."""
        from components.report.card.markdown import markdown

        return markdown(self.content)

    @property
    def table(self) -> "pd.DataFrame":
        """One row per figure: suite, badge, value with its interval, and why there is none."""
        return frame(self.records()["figures"])

    def records(self) -> dict[str, Any]:
        """The card as JSON values."""
        content = self.content
        return {
            "model": content.subject.name,
            "digest": content.subject.digest,
            "identity": {fact.term: fact.value for fact in content.identity},
            "headline": [_record(figure) for figure in content.strip],
            "figures": [_record(figure) for figure in content.suites],
            "checks": [asdict(check) for check in content.checks],
            "verdicts": [asdict(verdict) for verdict in content.verdicts],
            "remarks": list(content.remarks),
            "published": self.published or None,
            "files": [str(path) for path in self.files],
        }


def _record(figure: "Figure") -> dict[str, Any]:
    share = figure.share
    return {
        "suite": figure.suite,
        "title": figure.title,
        "detail": figure.detail,
        "badge": figure.badge,
        "state": figure.state,
        "text": figure.text,
        "value": share.value if share else figure.score,
        "low": share.low if share else None,
        "high": share.high if share else None,
        "num_items": figure.num_items,
        "budget": figure.budget,
        "result": figure.source or None,
        "note": figure.note or None,
    }


def card(
    model: str | Path,
    *,
    names: Collection[str] = (),
    storage: str | Path | Sequence[str | Path] | None = None,
    tracking: str | None = None,
    out: str | Path | None = None,
    publish: bool = False,
) -> list[Card]:
    """The cards of a model, or of every classifier of a flow.

    `model`: a model folder, a finished training or a flow (paths or URIs), a registered version
    (`models:/NAME@ALIAS`, `models:/NAME/VERSION`) or a run of MLflow (`mlflow:ID`). `names`
    chooses models of a flow. Results are searched by the model's digest in its own storage,
    or in each `storage`, which may also be a flow, a step or a certificate. What does not verify is
    shown with the reason and without its numbers. `out`: a page (.html), Markdown (.md), or a
    folder that gets both for every model. `publish` sets the description of the model's
    registered version in MLflow's store `tracking`.

    >>> from pipelines import api
    >>> import tempfile
    >>> api.card(tempfile.mkdtemp())
    Traceback (most recent call last):
    components.core.errors.CasemateError: card: ... holds no finished model; name a model ...
    """
    from pipelines.api.card_models import named_models

    roots = _roots(storage)
    target = None if out is None else output_file_or_folder(out, (HTML, MARKDOWN))
    first = roots[0] if roots else None
    models = named_models(str(model), chosen=names, storage=first, tracking=tracking)
    _check_target(target, models)
    cards = [_card(one, roots) for one in models]
    if publish:
        cards = [_published(one, storage=first, tracking=tracking) for one in cards]
    return [_written(one, target) for one in cards]


def _roots(storage: str | Path | Sequence[str | Path] | None) -> list[str]:
    given = [storage] if isinstance(storage, str | Path) else list(storage or ())
    for root in given:
        if not is_uri(str(root)) and not Path(root).expanduser().exists():
            raise CasemateError("storage", root, "does not exist")
    return [str(root) for root in given]


def _check_target(target: Path | None, models: "Sequence[NamedModel]") -> None:
    """Refuse one file for several models, before anything is verified."""
    if target is not None and target.suffix in (HTML, MARKDOWN) and len(models) > 1:
        shown = ", ".join(model.name for model in models)
        remedy = f"is one file for {len(models)} models ({shown}); name a folder, or one model"
        raise CasemateError(OUT, target, remedy)


def _card(model: "NamedModel", roots: Sequence[str]) -> Card:
    from components.report.card.content import build_card
    from pipelines.api.card_results import findings, results_about, results_of

    own = list(results_about(model, results_of(model, roots)))
    return Card(model, build_card(_subject(model, [r for r, _ in own]), findings(model, own)))


def _subject(model: "NamedModel", results: Sequence[FoundResult]) -> "Subject":
    from components.data.stream import read_document
    from components.report.card.reading import read_subject
    from components.report.content import Fact
    from pipelines.api.card_models import dataset_of
    from pipelines.stages.report.cards import dataset_words, software_facts

    made = model.training
    prepared = dataset_of(model, results)
    document = read_document(prepared / "dataset.json") if prepared else {}
    facts = [Fact("Recipe", made.flow)] if made else []
    if model.version is not None:
        facts.append(Fact("Registered as", str(model.version)))
    return read_subject(
        model.name,
        model.folder,
        facts=[*facts, *software_facts(made.manifest if made else None)],
        classes=[str(name) for name in document.get("classes", ())],
        origin=dataset_words(prepared) if prepared else "",
        trained_by=(made.step, made.files) if made else None,
    )


# -- writing and publishing


def _written(card: Card, target: Path | None) -> Card:
    from components.core.files import write_atomic
    from pipelines.api.card_results import file_name

    if target is None:
        return card
    texts: Mapping[Path, str]
    if target.suffix == HTML:
        texts = {target: card.html}
    elif target.suffix == MARKDOWN:
        texts = {target: card.markdown}
    else:
        target.mkdir(exist_ok=True)
        stem = file_name(card.model.name)
        texts = {target / f"{stem}{HTML}": card.html, target / f"{stem}{MARKDOWN}": card.markdown}
    for path, text in texts.items():
        try:
            write_atomic(path, text.encode())
        except OSError as error:
            raise CasemateError(OUT, path, f"cannot be written ({error.strerror})") from error
    return Card(card.model, card.content, card.published, tuple(texts))


def _published(card: Card, *, storage: str | None, tracking: str | None) -> Card:
    """The card as description of the registered version."""
    from components.report.card.markdown import markdown
    from pipelines.api.contenders import store_of
    from pipelines.runtime.registered_models import describe, version_of_run
    from pipelines.stages.report.cards import DESCRIPTION_LENGTH

    model = card.model
    root = storage or (model.roots[0] if model.roots else None)
    uri = store_of(model.name, storage=root, tracking=tracking, key="publish")
    version = model.version
    if version is None:
        run_id = _run_of(model)
        version = version_of_run(run_id, uri) if run_id else None
    if version is None:
        remedy = "is not registered in MLflow; train it in a flow, or name models:/NAME@ALIAS"
        raise CasemateError("publish", model.name, remedy)
    describe(version, markdown(card.content, limit=DESCRIPTION_LENGTH), uri)
    return Card(model, card.content, str(version), card.files)


def _run_of(model: "NamedModel") -> str:
    manifest = model.training.manifest if model.training else None
    return manifest.mlflow_run_id if manifest else ""
