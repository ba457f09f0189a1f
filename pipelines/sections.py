"""The sections of a recipe: frozen pydantic models; every default of the system lives here.

Epsilons and sigmas are pixels in [0, 1] and may be written as fractions (`8/255`).
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from pipelines.hints import did_you_mean


def _as_pixels(value: object) -> object:
    """`8/255` and plain numbers; a value above 1 is almost always a forgotten /255."""
    if isinstance(value, str):
        try:
            value = float(Fraction(value.replace(" ", "")))
        except (ValueError, ZeroDivisionError):
            raise PydanticCustomError(
                "pixels", "is not a number or a fraction such as 8/255"
            ) from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("pixels", "is not a number or a fraction such as 8/255")
    if not 0 <= value <= 1:
        raise PydanticCustomError(
            "pixels", "is outside [0, 1]; pixels are fractions of full scale, write e.g. 8/255"
        )
    return float(value)


Pixels = Annotated[float, BeforeValidator(_as_pixels)]
PositivePixels = Annotated[float, BeforeValidator(_as_pixels), Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]


class Section(BaseModel):
    """A frozen part of a recipe that refuses unknown keys and says which ones it knows."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for key in values:
                if key not in cls.model_fields:
                    hint = did_you_mean(str(key), cls.model_fields)
                    raise PydanticCustomError(
                        "unknown_key", "{hint}", {"key": str(key), "hint": hint}
                    )
        return values


class DataSection(Section):
    """Which images, how they are split and fitted to one size."""

    source: Annotated[
        str, Field(pattern=r"^(mnist5k|digits|folder|npz|torchvision:(cifar10|cifar100))$")
    ]
    path: str | None = None  # folder, npz file, or torchvision root
    image_size: Count | None = None  # None: as stored, all items alike
    fit: Literal["pad", "resize"] = "pad"
    channels: Literal[1, 3] | None = None  # None: as the source
    split_seed: int = Field(default=0, ge=0)  # not the recipe's: test items stay test items
    val_fraction: float = Field(default=0.1, gt=0, lt=1)
    test_fraction: float = Field(default=0.2, gt=0, lt=1)  # only where the source has no test split
    limits: dict[Literal["train", "val", "test"], Count] = {}
    on_error: Literal["fail", "skip"] = "fail"
    shard_size: Count = 1024

    @model_validator(mode="after")
    def _path_where_needed(self) -> Self:
        embedded = self.source in ("mnist5k", "digits")
        if embedded and self.path is not None:
            raise PydanticCustomError(
                "path", "data.path would be ignored: this source is embedded; remove it"
            )
        if not embedded and self.path is None:
            raise PydanticCustomError(
                "path", "data.path is missing: this source reads files; name their place"
            )
        if self.val_fraction + self.test_fraction >= 1:
            raise PydanticCustomError(
                "fractions", "val_fraction + test_fraction leave nothing to train on"
            )
        return self


class ModelSection(Section):
    """An architecture and its input adapter."""

    architecture: str = "tiny_vit"
    options: dict[str, Any] = {}  # arguments of the architecture, e.g. patch_size
    upsample: Count | None = None
    mean: list[float] | None = None  # None: 0.5 in every channel
    std: list[float] | None = None
    token_policy: Literal["drop", "mask"] = "mask"


class StandardObjective(Section):
    """Cross-entropy on clean images."""

    kind: Literal["standard"] = "standard"


class FgsmObjective(Section):
    """Adversarial training with 1 or 2 FGSM steps (Debenedetti et al. 2022, sec. 4)."""

    kind: Literal["fgsm"]
    eps: PositivePixels
    num_steps: int = Field(default=1, ge=1, le=10)
    eps_warmup_epochs: int = Field(default=0, ge=0)


class ColumnsObjective(Section):
    """Training on column ablations (Salman et al. 2022, sec. 2)."""

    kind: Literal["columns"]
    band: Count


class GaussianObjective(Section):
    """Training on Gaussian noise (Cohen et al. 2019, sec. 3.3)."""

    kind: Literal["gaussian"]
    sigma: PositivePixels


Objective = Annotated[
    StandardObjective | FgsmObjective | ColumnsObjective | GaussianObjective,
    Field(discriminator="kind"),
]


class AugmentSection(Section):
    """Per-item random augmentation."""

    pad_crop: int = Field(default=0, ge=0)
    flip: bool = False


class VariantSection(Section):
    """A further model of the same recipe: the train section with another objective."""

    objective: Objective
    epochs: Count | None = None


class TrainSection(Section):
    """Optimisation of the model `main` and of its variants."""

    objective: Objective = StandardObjective()
    variants: dict[Name, VariantSection] = {}
    epochs: Count = 10
    batch_size: Count = 128  # global, whatever the number of workers
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.05, ge=0)
    warmup_epochs: int = Field(default=1, ge=0)  # of the learning rate
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    clip_norm: float = Field(default=1.0, gt=0)
    augment: AugmentSection = AugmentSection()
    val_items: Count = 256  # how many validation items are attacked after each epoch
    val_eps: PositivePixels | None = None  # None: eps of an fgsm objective, else no attack
    val_steps: Count = 10


class TuneSection(Section):
    """Ray Tune over dotted recipe keys; the objective is validation accuracy under PGD."""

    space: dict[str, list[Any]] = Field(min_length=1)
    metric: Literal["val_robust_accuracy", "val_accuracy"] = "val_robust_accuracy"
    epochs: Count | None = None  # None: train.epochs
    train_items: Count | None = None  # None: all
    grace_epochs: Count = 1
    reduction_factor: int = Field(default=2, ge=2)


class PgdAttack(Section):
    """l-inf PGD with a random start (Madry et al. 2018)."""

    kind: Literal["pgd"]
    models: list[str] = Field(default=["main"], min_length=1)
    eps: PositivePixels
    num_steps: Count = 20
    step_size: PositivePixels | None = None  # None: eps / 4
    num_items: Count | None = None  # None: the whole test split
    micro_batch: Count = 25  # rows of every forward pass: logits depend on the batch shape


class PatchChallenge(Section):
    """An adaptive patch attack on some items: a certified one that falls fails the stage."""

    patch_size: Count
    num_items: Count = 20
    num_steps: Count = 20
    num_positions: Count = 4


class ColumnsCertify(Section):
    """Patch certificates from votes over column ablations (Salman et al. 2022)."""

    kind: Literal["columns"]
    model: str = "main"
    band: Count | None = None  # None: the width the model was trained with
    stride: Count = 1
    patch_sizes: list[Count] = Field(min_length=1)
    rule: Literal["strict", "count", "loc"] = "count"
    num_items: Count | None = None
    micro_batch: Count = 64
    challenge: PatchChallenge | None = None

    @model_validator(mode="after")
    def _challenge_is_claimed(self) -> Self:
        if self.challenge and self.challenge.patch_size not in self.patch_sizes:
            raise PydanticCustomError(
                "model",
                "challenge.patch_size: {size} is not among the claimed patch_sizes {claimed}",
                {"size": self.challenge.patch_size, "claimed": str(self.patch_sizes)},
            )
        return self


class L2Challenge(Section):
    """An l2 attack on the smoothed classifier; a certified item that falls fails the stage."""

    eps: float = Field(gt=0)
    num_items: Count = 20
    num_steps: Count = 10
    num_draws: Count = 16
    num_predict: Count = 1000


class GaussianCertify(Section):
    """Randomized smoothing; defaults are the setting of Cohen et al. 2019, sec. 4."""

    kind: Literal["gaussian"]
    model: str = "main"
    sigma: PositivePixels
    num_select: Count = 100  # n0
    num_estimate: Count = 100_000  # n
    failure_prob: float = Field(default=0.001, gt=0, lt=1)  # alpha
    radii: list[Annotated[float, Field(gt=0)]] = Field(default=[0.25, 0.5, 0.75, 1.0], min_length=1)
    block_size: Count = 1_000  # draws per unit of work
    micro_batch: Count = 100
    num_items: Count | None = None
    challenge: L2Challenge | None = None

    @model_validator(mode="after")
    def _can_ever_certify(self) -> Self:
        # With k = n the Clopper-Pearson bound is alpha^(1/n); at 1/2 or less every item abstains.
        if self.failure_prob ** (1 / self.num_estimate) <= 0.5:
            raise PydanticCustomError(
                "hopeless",
                "num_estimate: {n} draws with failure_prob {alpha} can never certify anything; "
                "raise num_estimate above log2(1/failure_prob) or raise failure_prob",
                {"n": self.num_estimate, "alpha": self.failure_prob},
            )
        if self.block_size % self.micro_batch:
            raise PydanticCustomError(
                "blocks",
                "block_size: {size} is not a multiple of micro_batch {micro}",
                {"size": self.block_size, "micro": self.micro_batch},
            )
        return self


class ReportSection(Section):
    """The page at the end."""

    title: str | None = None
    num_examples: int = Field(default=4, ge=0)


class ClusterSection(Section):
    """Where the work runs; never part of a result's identity."""

    address: str | None = None  # None: a local Ray of this process
    num_cpus: Count | None = None  # of the local Ray; None: all cores
    object_store_mb: Count = 512
    train_workers: Count = 1
    cpus_per_train_worker: Count = 1
    num_actors: Count | None = None  # None: as many as fit
    cpus_per_actor: Count = 1
    gpus_per_worker: float = Field(default=0, ge=0)  # per train worker and per actor
    max_failures: int = Field(default=3, ge=0)  # restarts of a training after lost workers


class StorageSection(Section):
    """Where artifacts are kept."""

    root: str = "runs"


class TrackingSection(Section):
    """MLflow."""

    uri: str | None = None  # None: SQLite beside the storage
    experiment: str = "casemate"


Certify = Annotated[ColumnsCertify | GaussianCertify, Field(discriminator="kind")]
Attack = Annotated[PgdAttack, Field()]
