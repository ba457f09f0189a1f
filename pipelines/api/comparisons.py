"""Finished results of several models, compared item by item."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from pipelines.api.outputs import output_file
from pipelines.api.tables import frame

if TYPE_CHECKING:
    import pandas as pd

    from components.evaluate.comparison import Compared
    from components.evaluate.verdicts import Verdicts
    from pipelines.api.contenders import Contender, Named
    from pipelines.api.item_verdicts import ModelVerdicts

KEY, SUFFIX = "compare", ".html"


@dataclass(frozen=True)
class ComparedModel:
    """One model: its label, its name in the flow, its digest and where its results are."""

    label: str
    model: str
    digest: str
    places: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Figures of several models on the same items, their differences, and what was refused."""

    models: tuple[ComparedModel, ...]
    compared: "Compared"
    page: Path | None = None

    @property
    def table(self) -> "pd.DataFrame":
        """One row per figure and pair: difference, interval, won and lost items, p-values."""
        return frame(self.records()["comparisons"])

    @property
    def shares(self) -> "pd.DataFrame":
        """One row per figure and model, with 95% intervals."""
        return frame(self.records()["shares"])

    @property
    def refused(self) -> "pd.DataFrame":
        """What cannot be compared, and why."""
        return frame(self.records()["not_comparable"])

    def records(self) -> dict[str, Any]:
        """All of it as JSON values."""
        found = self.compared
        return {
            "models": [{**asdict(m), "places": list(m.places)} for m in self.models],
            "shares": [asdict(share) for share in found.shares],
            "comparisons": [{**asdict(c), "outcome": c.outcome} for c in found.comparisons],
            "not_comparable": [{**r._asdict(), "figures": list(r.figures)} for r in found.refusals],
            "page": str(self.page) if self.page else None,
        }


def compare(
    named: "Named",
    *,
    models: Sequence[str] = (),
    storage: str | Path | None = None,
    tracking: str | None = None,
    out: str | Path | None = None,
) -> Comparison:
    """Compare finished results of several models on the same items.

    `named`: storages, flows, steps, certificates, model folders (paths or URIs) and runs of MLflow
    (`mlflow:ID`); each may be LABEL=PLACE, or a mapping gives labels. `models` chooses by name
    where a place has several. Results of a model folder are searched in `storage`, by default the
    one it was trained in; `tracking` is the store of MLflow's runs. Every two models are
    compared on all figures that both have: the difference with a 95% interval, and the exact
    p-value of McNemar's test, adjusted for the number of tests. Results are verified
    first. What differs in items, labels, budget, preprocessing, attacks or draws is refused with
    its reason. `out` (.html) is written as a page.

    >>> from pipelines import api
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> images = torch.randint(256, (12, 3, 8, 8), dtype=torch.uint8)
    >>> labels = torch.arange(12) % 3
    >>> folders = {}
    >>> for name in ("a", "b"):
    ...     network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 3))
    ...     model = api.load_model(network, image_size=8)
    ...     made = api.certify_patch(model, images, labels, patch_sizes=[1], band=4)
    ...     folders[name] = made.folder
    >>> found = api.compare(folders)
    >>> found.table[["figure", "one", "other", "test", "outcome"]].values.tolist()[0]
    ['smoothed.patch', 'a', 'b', 'McNemar', 'tie']
    """
    from components.evaluate.comparison import compare as compare_verdicts
    from pipelines.api.contenders import contenders

    target = None if out is None else output_file(out, [SUFFIX])
    found = _models(contenders(named, storage=storage, tracking=tracking), models)
    if len(found) < 2:
        what = ", ".join(model.label for model in found)
        remedy = "is one model; name results of at least two"
        raise CasemateError(KEY, what, remedy)
    compared = compare_verdicts({model.label: verdicts for model, verdicts in found.items()})
    outcome = Comparison(tuple(found), compared, target)
    if target is not None and compared.comparisons:
        _write(outcome, found, target)
    return outcome


def nothing_compared(found: Comparison) -> CasemateError:
    """The error for results of which nothing can be compared: all reasons in one line."""
    reasons = [f"{', '.join(r.figures)}: {r.why}" for r in found.compared.refusals]
    labels = " and ".join(model.label for model in found.models)
    return CasemateError(KEY, labels, f"cannot be compared: {'; '.join(reasons)}")


def _models(
    given: "Sequence[Contender]", chosen: Sequence[str]
) -> "dict[ComparedModel, list[Verdicts]]":
    """Every model of every contender with its verdicts; a label names the only model of one."""
    from pipelines.api.item_verdicts import verdicts_of

    found: dict[ComparedModel, list[Verdicts]] = {}
    known: set[str] = set()
    for one in given:
        every = [v for result in one.results for v in verdicts_of(result)]
        own = [v for v in every if not one.digest or v.digest == one.digest]
        if not own:
            remedy = "holds no finished attack, evaluation or certificate with verdicts per item"
            raise CasemateError(KEY, one.label, remedy)
        known |= {v.model for v in own}
        if chosen and len({v.digest for v in own}) > 1:
            own = [v for v in own if v.model in chosen]
        found |= _by_model(one.label, own)
    if unknown := [name for name in chosen if name not in known]:
        remedy = f"is not a model of these results; they have {', '.join(sorted(known))}"
        raise CasemateError("models", unknown[0], remedy)
    return found


def _by_model(label: str, own: "Sequence[ModelVerdicts]") -> "dict[ComparedModel, list[Verdicts]]":
    """Verdicts by model; what cannot be read and has no digest is a doubt about each."""
    digests = [d for d in dict.fromkeys(v.digest for v in own) if d] or [""]
    names = {v.digest: v.model for v in reversed(own)}
    found = {}
    for digest in digests:
        name = names[digest]
        if list(names.values()).count(name) > 1:  # models of several flows
            name = f"{name} {digest[:12]}"
        verdicts = [v.verdicts for v in own if v.digest in (digest, "")]
        places = tuple(dict.fromkeys(v.place for v in verdicts))
        full = label if len(digests) == 1 else f"{label}/{name}"
        found[ComparedModel(full, names[digest], digest, places)] = verdicts
    return found


def _write(
    found: Comparison, verdicts: "Mapping[ComparedModel, Sequence[Verdicts]]", path: Path
) -> None:
    from components.core.files import atomic
    from components.report.comparison import Subject, comparison_page
    from components.report.page import render

    subjects = [Subject(m.label, m.model, m.digest, m.places, own) for m, own in verdicts.items()]
    text = render(comparison_page(subjects, found.compared))
    with atomic(path) as temporary:
        temporary.write_bytes(text.encode())
