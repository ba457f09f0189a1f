"""Results of finished steps as plain values: what every chapter of the report is made of."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.certify.certificate import CertificateDocument
from components.certify.family import AnyFamily
from components.certify.registry import family_of
from components.core.folders import Folder
from components.core.statistics import accuracy
from components.core.types import Array, IntArray, Json
from components.report.content import Accuracy
from components.report.wording import attack_list_words


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A trained model and its history."""

    model: str
    rows: tuple[Json, ...]
    digest: str
    spec: Json
    num_weights: int | None = None  # None: in a remote storage, which is not read for it


@dataclass(frozen=True, slots=True)
class TunedTrial:
    """One trial of a search; a failed trial has no score."""

    number: int
    name: str | None  # of a step of an additive ablation
    values: Json
    score: Accuracy | None
    clean: Accuracy | None
    epochs: int
    status: str
    tied: bool  # not significantly different from the best trial


@dataclass(frozen=True, slots=True)
class AddedStep:
    """A step of an additive ablation; `difference` is (value, low, high) to the step before."""

    name: str
    changes: Json
    score: Accuracy | None
    clean: Accuracy | None
    difference: tuple[float, float, float] | None


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The trials of a search, best first, and the steps of an additive ablation, if it is one."""

    metric: str
    scheduler: str
    attack: Json
    space: Json  # per key: its list of values, or its distribution
    trials: tuple[TunedTrial, ...]
    chance: float | None = None  # share of the most frequent label; None in searches without it
    steps: tuple[AddedStep, ...] = ()


@dataclass(frozen=True, slots=True)
class Examples:
    """Some attacked items of one model: images are (E, C, H, W) in [0, 1]."""

    clean: Array
    adversarial: Array
    label: Array
    clean_prediction: Array
    adversarial_prediction: Array


@dataclass(frozen=True, slots=True)
class ItemOutcomes:
    """Labels and predictions of all attacked items of one model, in the order of the test split."""

    label: IntArray
    clean: IntArray
    attacked: IntArray
    broken_by: tuple[str | None, ...]

    def clean_share(self, num_items: int) -> Accuracy:
        """Clean accuracy on the first items."""
        held = self.clean[:num_items] == self.label[:num_items]
        return Accuracy.parse(accuracy(held), where="attacks.parquet")


@dataclass(frozen=True, slots=True)
class AttackStep:
    """One attack of a list: the items it was given, and the accuracy after it and all before it."""

    name: str
    entry: str  # the line of the recipe, e.g. the ensemble it belongs to
    num_items: int
    num_broken: int
    left: Accuracy
    num_evaluations: int
    num_gradients: int
    zero_gradient_rate: float


@dataclass(frozen=True, slots=True)
class AttackedModel:
    """The results of a list of attacks on one model."""

    clean: Accuracy
    robust: Accuracy
    num_evaluations: int
    zero_gradient_rate: float  # share of all gradients that were exactly zero
    steps: tuple[AttackStep, ...]
    curves: dict[str, tuple[tuple[float, Accuracy], ...]]  # by `eps` or `steps`
    sanity: Json | None
    protocols: Json  # of attacks with scaled attention
    examples: Examples  # of the first items
    broken: Examples | None = None  # of the first broken items; None: not kept by older versions
    items: ItemOutcomes | None = None  # None: without attacks.parquet


@dataclass(frozen=True, slots=True)
class AttackResult:
    """A list of attacks on one or more models."""

    name: str
    threat: Json
    models: dict[str, AttackedModel]
    settings: Json

    @property
    def title(self) -> str:
        """The names of the attacks of the list."""
        steps = next(iter(self.models.values())).steps
        return attack_list_words([step.entry for step in steps])

    @property
    def clean(self) -> dict[str, Accuracy]:
        return {name: model.clean for name, model in self.models.items()}

    @property
    def robust(self) -> dict[str, Accuracy]:
        return {name: model.robust for name, model in self.models.items()}


@dataclass(frozen=True, slots=True)
class Challenge:
    """An attack on certified items: `certified` and `robust` are shares of the same items."""

    attack: str
    threat: Json
    certified: Accuracy
    robust: Accuracy
    broken_certified: int


@dataclass(frozen=True, slots=True)
class CertifyResult:
    """One certificate with its claims per item and the attack that challenged it, if any."""

    name: str
    folder: Folder
    document: CertificateDocument
    columns: dict[str, list[Any]]  # certificates.parquet
    challenge: Challenge | None

    @property
    def kind(self) -> str:
        """The kind of certificate."""
        return self.document.kind

    @property
    def family(self) -> AnyFamily:
        """The certificate family."""
        return family_of(self.kind)

    @property
    def sound(self) -> bool:
        """False for a claim that only reproduces published tables."""
        return self.document.sound

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Per item: the smoothed prediction is the label (an abstention is not)."""
        return np.asarray(self.columns["correct"], dtype=np.bool_)

    def certified_at(self, budget: float, *, rule: str = "") -> NDArray[np.bool_]:
        """Per item: correct, and proven against this budget; `rule`: the second one, if any."""
        return self.correct & self.family.proven_at(self.columns, budget, rule=rule)
