"""The worker of the attack stage: from a task on a loaded model to a table of results.

A task's result depends on its settings and its items alone: random numbers belong to items, and
every forward pass of an attack has the rows and the precision of `AttackPasses`.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Literal

import pyarrow as pa
import torch
from torch import Tensor

from components.attacks.aas import ScaledReport, worst_of
from components.attacks.base_settings import Norm
from components.attacks.evaluation import check_attackable
from components.attacks.gradient import in_fixed_batches
from components.attacks.gradients import attack_mode
from components.attacks.interface import AttackResult, Items
from components.attacks.listing import ListedAttack, attention_scales, scaled_attack
from components.attacks.losses import margin
from components.attacks.passes import AskedPasses, AttackPasses, decided_passes
from components.attacks.sanity.model import refuse_probabilities
from components.attacks.scales import Scales
from components.attacks.settings import AasSettings
from components.core.arithmetic import EXACT, use
from components.core.folders import Folder
from components.core.types import Images, LogitsFn
from components.core.units import WorkFn
from components.data.prepared import PreparedDataset
from components.models.checkpoint import load_model
from components.models.compiling import compile_network, eager
from components.models.fast import fast_forward
from components.models.logits import check_logits
from components.models.pixels import PixelModel
from pipelines.runtime.devices import device_name, worker_device
from pipelines.stages.attack import sanity

DEVICE = "device"  # column of every table
NUM_EXAMPLES = 6  # first items, and first broken items, whose images are kept for the report
NUM_PROBED = 25  # items on which a model must return logits before it is attacked


@dataclass(frozen=True, slots=True)
class AttackConfig:
    """Paths and settings of a worker, no tensors."""

    dataset: Folder
    models: Mapping[str, Folder]
    norm: Norm | Literal["spatial"]
    eps: float | None  # None with norm `spatial`
    passes: AttackPasses
    seed: int


@dataclass(frozen=True, slots=True)
class ModelTask:
    """Work with one model of the recipe."""

    model: str


@dataclass(frozen=True, slots=True)
class CleanTask(ModelTask):
    """The model's predictions on these clean items."""

    items: tuple[int, ...]  # indices into the test split


@dataclass(frozen=True, slots=True)
class AttackTask(ModelTask):
    """One attack on these items; `scales` are the candidates of a scaled one."""

    listed: ListedAttack
    items: tuple[int, ...]
    scales: tuple[Scales, ...] = ()


@dataclass(frozen=True, slots=True)
class ScalesTask(ModelTask):
    """The candidates of a scaled attack, found once per model."""

    entry: AasSettings


@dataclass(frozen=True, slots=True)
class AuditTask(ModelTask):
    """The sanity suite on the first items; transfer from `surrogate` where there is one."""

    num_items: int
    surrogate: str | None


Task = CleanTask | AttackTask | ScalesTask | AuditTask


class AttackWorker:
    """Opens the data once and each model once, then runs one task after the other."""

    def __init__(self, config: AttackConfig, device: str) -> None:
        self.config, self.device, self.passes = config, device, config.passes
        self.split = PreparedDataset.open(config.dataset).on_demand("test")
        self.model = cache(self.load)
        self._kept_open = ExitStack()

    @torch.no_grad()
    def load(self, name: str) -> PixelModel:
        """A model that returns logits of each image by itself, tried on the first items."""
        model = load_model(self.config.models[name], device=self.device)
        if self.passes.compiled:
            self._compile(model)
        probed = self.items(range(min(NUM_PROBED, len(self.split))))
        with attack_mode(model):
            logits = check_logits(self.fixed(model)(probed.x), probed.item_ids)
            refuse_probabilities(logits, model=name)
            check_attackable(model, probed.x, name=name)
        return model

    def _compile(self, model: PixelModel) -> None:
        """Compile the network with its fast passes, which stay: others would be compiled anew."""
        self._kept_open.enter_context(fast_forward(model.net))
        with attack_mode(model):
            if why := compile_network(model, rows=self.passes.micro_batch):
                raise RuntimeError(f"{why}; it worked on the first worker of this step")

    def items(self, places: Sequence[int]) -> Items:
        part = self.split.rows(torch.tensor(places, dtype=torch.int64))
        pixels, labels = part.pixels().to(self.device), part.labels.to(self.device)
        return Items(pixels, labels, part.item_ids, self.config.seed)

    def __call__(self, task: Task) -> pa.Table:
        """The results of a task; every row names the device that computed it."""
        table = self.run(task)
        names = pa.array([device_name(self.device)] * len(table), pa.string())
        return table.append_column(DEVICE, names)

    def run(self, task: Task) -> pa.Table:
        model: PixelModel = self.model(task.model)
        compiled = self.passes.compiled
        by_own_code = compiled and isinstance(task, ScalesTask | AuditTask)  # they use hooks
        with (
            attack_mode(model),
            nullcontext() if compiled else fast_forward(model.net),
            eager(model.net) if by_own_code else nullcontext(),
        ):
            match task:
                case CleanTask():
                    return self.clean(model, self.items(task.items))
                case AttackTask():
                    return self.attack(model, task)
                case ScalesTask():
                    return self.scales(model, task.entry)
                case AuditTask():
                    return self.audit(model, task)

    def fixed(self, model: PixelModel) -> LogitsFn:
        return in_fixed_batches(self.passes.logits_of(model), size=self.passes.micro_batch)

    @torch.no_grad()
    def clean(self, model: PixelModel, items: Items) -> pa.Table:
        logits = check_logits(self.fixed(model)(items.x), items.item_ids)
        return pa.table(
            {
                "item_id": list(items.item_ids),
                "label": _integers(items.y),
                "clean_prediction": _integers(logits.argmax(dim=1)),
                "margin": _numbers(margin(logits, items.y)),
            }
        )

    def attack(self, model: PixelModel, task: AttackTask) -> pa.Table:
        items = self.items(task.items)
        if task.listed.scaling is None:
            result = task.listed.attack(self.fixed(model), items)
            return self.rows(task.items, items, result)
        scaled = scaled_attack(task.listed, model.net, task.scales)
        report = scaled.examine(self.fixed(model), items)
        control = scaled.restarts()(self.fixed(model), items)
        # Items that plain restarts break are broken, too; both results are also kept apart.
        every = torch.arange(len(items), device=items.y.device)
        table = self.rows(task.items, items, worst_of(report.result, control, items.y, every))
        found = report.result.adversarial_prediction == items.y
        table = table.append_column("scaled_union_correct", pa.array(found.tolist(), pa.bool_()))
        for name, column in _protocol(report).items():
            table = table.append_column(name, pa.array(column, pa.list_(pa.bool_())))
        restarted = control.adversarial_prediction == items.y
        return table.append_column("restarts_correct", pa.array(restarted.tolist(), pa.bool_()))

    def rows(self, places: tuple[int, ...], items: Items, result: AttackResult) -> pa.Table:
        """One row per item; images only of the first items and of the first broken ones."""
        x_adv = result.x_adv.cpu().numpy()
        broken = (result.adversarial_prediction != items.y).nonzero().flatten().tolist()
        kept = {places[row] for row in broken[:NUM_EXAMPLES]} | set(range(NUM_EXAMPLES))
        distances = distance(result.x_adv, items.x, norm=self.config.norm)
        return pa.table(
            {
                "place": pa.array(places, pa.int64()),
                "clean_prediction": _integers(result.clean_prediction),
                "adversarial_prediction": _integers(result.adversarial_prediction),
                "num_evaluations": _integers(result.num_evaluations),
                "num_gradients": _integers(result.num_gradients),
                "num_zero_gradients": _integers(result.num_zero_gradients),
                "norm": pa.array(distances, pa.float64()),
                "margin": _numbers(result.known_margins),
                "image": pa.array(
                    [
                        image.tobytes() if place in kept else None
                        for place, image in zip(places, x_adv, strict=True)
                    ],
                    pa.binary(),
                ),
            }
        )

    def scales(self, model: PixelModel, entry: AasSettings) -> pa.Table:
        num_items = min(entry.search.num_items if entry.search else 0, len(self.split))
        reference = self.items(range(num_items))
        found = attention_scales(entry, model, model.net, reference)
        return pa.table({"scales": pa.array(found, pa.list_(pa.float64()))})

    def audit(self, model: PixelModel, task: AuditTask) -> pa.Table:
        assert self.config.norm != "spatial"  # the recipe refuses sanity checks of it
        assert self.config.eps is not None
        return sanity.audit_table(
            model,
            self.items(range(task.num_items)),
            norm=self.config.norm,
            eps=self.config.eps,
            surrogate=self.model(task.surrogate) if task.surrogate else None,
        )


def make_worker(config: AttackConfig) -> WorkFn:
    use(config.passes.arithmetic)
    return AttackWorker(config, worker_device())


def make_prober(asked: tuple[AttackConfig, AskedPasses]) -> WorkFn:
    """The worker that decides how the passes of all models are computed."""
    config, passes_asked = asked
    use(EXACT)
    worker = AttackWorker(config, worker_device())

    def probe(model: str) -> pa.Table:
        few = worker.items(range(min(NUM_PROBED, len(worker.split)))).x
        passes = decided_passes(passes_asked, worker.model(model), few)
        return pa.table({"passes": [json.dumps(passes.to_dict())]})

    return probe


def distance(x_adv: Images, x: Images, *, norm: str) -> list[float | None]:
    """The size of each perturbation, in float64; None for rotations and shifts."""
    moved = (x_adv.double() - x.double()).flatten(1)
    if norm == "linf":
        lengths: list[float | None] = moved.abs().amax(dim=1).tolist()
        return lengths
    return moved.norm(dim=1).tolist() if norm == "l2" else [None] * len(x)


def _protocol(report: ScaledReport) -> dict[str, list[list[bool]]]:
    """Per item and candidate: whether the model itself and the rescaled network are correct."""
    networks = report.paper_protocol
    return {
        name: torch.stack([getattr(network, name) for network in networks], dim=1).tolist()
        for name in ("original_correct", "scaled_correct", "scaled_clean_correct")
    }


def _integers(values: Tensor) -> pa.Array:
    return pa.array(values.tolist(), pa.int64())


def _numbers(values: Tensor) -> pa.Array:
    return pa.array(values.tolist(), pa.float64())
