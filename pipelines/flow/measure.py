"""Speeds of a recipe's own work, timed in this process on random images and weights.

Each kind of work runs as in its stage: the real objective, attack or voter on networks and images
of the recipe's size. Passes are counted while they run, so a few steps tell the time of a pass.
"""

import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from components.attacks.base_settings import AttackSettings
from components.attacks.gradient import in_fixed_batches
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.attacks.listing import make_attack
from components.certify.registry import family_of
from components.certify.vote_requests import VoteRequest
from components.core import arithmetic
from components.core.arithmetic import EXACT, using
from components.core.errors import CasemateError
from components.core.folders import Folder
from components.core.pass_counts import ascent
from components.data.corruptions.generate import corrupt
from components.data.memory import MemoryDataset, numbered
from components.data.prepared import ImageSplit
from components.models.checkpoint import save_model
from components.models.counting import counted_passes
from components.models.fast import fast_forward
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from components.train.epoch import StepDone, train_epoch
from components.train.feed import Feeding, Worker
from components.train.passes import arithmetic_on
from components.train.session import Session, initial_model
from components.train.validation import robust_accuracy, validation_attack, validation_score
from pipelines.flow.overheads import Overheads, measured_overheads
from pipelines.recipe import build
from pipelines.recipe.costs import (
    NO_SPEED,
    NUM_CLASSES,
    Speed,
    TrainingSpeeds,
    image_side,
)
from pipelines.recipe.facts import given_spec, known_channels, source_info, spec_of
from pipelines.recipe.load import with_values
from pipelines.recipe.model_costs import folder_costs, model_cost
from pipelines.recipe.schema.attack import AttackSection
from pipelines.recipe.schema.recipe import Recipe
from pipelines.stages.attack.cost import rows_of_pass
from pipelines.stages.train.cost import TrainingCost
from pipelines.stages.train.session import make_session

SECONDS = 3.0  # that a kind of work is timed for, about
FLOPS = 1e11  # of what is timed at once on a CPU, about: some seconds
MOST_BYTES = 2**29  # of random images at a time
LEAST_STEPS, MOST_STEPS = 4, 40
HARMLESS = 1e-6  # a budget that breaks nothing: every row stays, as in the upper estimate
FEWER: Mapping[str, int] = {
    **{"num_steps": 5, "num_queries": 60, "num_restarts": 1, "num_targets": 2},
    **{"num_shifts": 3, "num_angles": 3},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeDataset:
    """Random images in the sizes and classes of a recipe, as far as work asks for them."""

    classes: tuple[str, ...]
    channels: int
    height: int
    width: int
    splits: Mapping[str, int]
    digest: str = "random"

    def open_split(
        self, split: str, *, memory_mb: int | None = None, limit: int | None = None
    ) -> ImageSplit:
        """Random pixels, different ones for each split."""
        count = min(self.splits[split], limit or self.splits[split])
        generator = torch.Generator().manual_seed(sum(map(ord, split)))
        shape = (count, self.channels, self.height, self.width)
        images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        labels = torch.arange(count) % len(self.classes)
        return ImageSplit(tuple(f"{split}-{name}" for name in numbered(count)), images, labels)


class _EnoughError(Exception):
    """Enough steps of an epoch."""


class MeasuredHere:
    """Speeds on this machine, each measured once."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        wants_gpu = recipe.cluster.gpus_per_train_worker or recipe.cluster.gpus_per_actor
        self.device = "cuda" if wants_gpu and torch.cuda.is_available() else "cpu"
        self._known: dict[tuple[Any, ...], Any] = {}

    @cached_property
    def overheads(self) -> Overheads:
        """What a flow takes besides passes."""
        return measured_overheads()

    def num_workers(self, stage: str) -> int:
        """Workers of a stage at once, as this machine has cores for them."""
        cluster = self.recipe.cluster
        cores = cluster.num_cpus or torch.multiprocessing.cpu_count()
        if stage == "tune":
            return max(1, cores // (cluster.train_workers * cluster.cpus_per_train_worker))
        if stage in ("prepare", "report"):
            return 1
        return cluster.num_actors or max(1, cores // cluster.cpus_per_actor)

    # Prepare

    def encoding(self, recipe: Recipe) -> Speed:
        """An image encoded and decoded again."""
        images = self._images(recipe, 8).permute(0, 2, 3, 1).numpy()
        target = self.folder / "image.png"

        def encode() -> None:
            for image in images:
                Image.fromarray(np.squeeze(image)).save(target, format="PNG")
                np.asarray(Image.open(target))

        return _timed(encode, device="cpu") / len(images)

    # Training

    def training(self, cost: TrainingCost) -> TrainingSpeeds:
        """Passes of the steps, of validation, and of the attack on it."""
        key = ("training", cost.model, repr(cost.train), repr(cost.recipe.model_of(cost.model)))
        if key not in self._known:
            threads = self._threads(cost.recipe.cluster.cpus_per_train_worker)
            with threads, using(arithmetic_on(cost.train, self.device)):
                self._known[key] = self._training(cost)
        found: TrainingSpeeds = self._known[key]
        return found

    def _rows(self, wanted: int, flops: float) -> int:
        """Rows of what is timed: fewer on a CPU where one takes so many FLOPs."""
        if self.device != "cpu":
            return wanted
        return min(wanted, max(4, round(FLOPS / max(flops, 1.0)) // 4 * 4))

    def _training(self, cost: TrainingCost) -> TrainingSpeeds:
        one = cost.flops * cost.epoch_counts(cost.epochs - 1).cost
        rows = self._rows(cost.batch_size, one / (cost.batch_size * cost.num_steps))
        if rows < cost.batch_size:
            smaller = with_values(cost.recipe, {"train.batch_size": rows})
            assert smaller.train is not None
            cost = replace(cost, recipe=smaller, train=smaller.train)
        num_val = min(cost.num_val, self._rows(128, cost.flops))
        batch_bytes = rows * math.prod(self._images(cost.recipe, 1).shape)
        num_steps = min(MOST_STEPS, max(LEAST_STEPS, MOST_BYTES // batch_bytes))
        data = self._dataset(cost.recipe, train=rows * num_steps, val=num_val)
        inputs = self._denoiser_folder(cost.recipe, cost.model)
        recipe = build.with_absolute_paths(cost.recipe, inputs)
        session = make_session(
            recipe,
            cost.model,
            data,  # type: ignore[arg-type]  # what it asks of a dataset
            fresh=False,
            device=torch.device(self.device),
            feeding=Feeding.by_threads(recipe.cluster.num_feed_threads),
        )
        steps = self._steps(session, cost)
        model = session.model
        model.eval()
        val = session.val if isinstance(session.val, ImageSplit) else session.val.take(num_val)
        seed = session.plan.seed
        validation = self._counted(
            model, lambda: validation_score(model, val, session.objective, seed=seed)
        )
        attacked = NO_SPEED
        if cost.attack_counts().cost:
            few = min(cost.train.val_steps, 3)
            milder = replace(cost.train, val_steps=few, val_eps=HARMLESS)
            attack = validation_attack(milder, session.objective)
            own = self._with_own_labels(model, val)
            assert attack is not None
            attacked = self._counted(model, lambda: robust_accuracy(model, own, attack, seed=seed))
        return TrainingSpeeds(steps, validation, attacked)

    def _steps(self, session: Session, cost: TrainingCost) -> Speed:
        """Steps of the last epoch that has some, after a first one."""
        epoch = max(e for e in range(cost.epochs) if session.objective.trains(e))
        marks: list[tuple[float, float, float]] = []
        with counted_passes(session.model) as seen:

            def after_step(done: StepDone) -> None:
                if session.average:
                    session.average.after_step(session.model)
                _finish(self.device)
                marks.append((time.perf_counter(), time.process_time(), seen.counts.cost))
                took = marks[-1][0] - marks[0][0]
                if len(marks) > LEAST_STEPS and took > SECONDS:
                    raise _EnoughError

            with suppress(_EnoughError):
                train_epoch(
                    session.wrapped,
                    session.model,
                    session.train,
                    session.objective,
                    session.updater,
                    plan=session.plan,
                    epoch=epoch,
                    worker=Worker(),
                    feeding=session.feeding,
                    after_step=after_step,
                )
        first, last = marks[min(1, len(marks) - 2)], marks[-1]
        wall, cpu, passes = (b - a for a, b in zip(first, last, strict=True))
        return Speed(wall / passes, cpu / passes)

    def _denoiser_folder(self, recipe: Recipe, model: str) -> Mapping[str, Folder]:
        """A random denoiser in place of the one that the recipe trains before."""
        behind = recipe.denoiser_of(model)
        return {} if behind is None else {f"train.{behind}": self._random_model(recipe, behind)}

    def _random_model(self, recipe: Recipe, name: str) -> Path:
        folder = self.folder / f"train.{name}"
        if not (folder / "model" / "model.json").exists():
            data = self._dataset(recipe)
            spec = build.model_spec(recipe, data, name)  # type: ignore[arg-type]
            save_model(folder / "model", initial_model(spec, seed=0), recipe_digest="random")
        return folder

    # Attacks, suites and studies

    def attack(
        self, recipe: Recipe, section: AttackSection, model: str, settings: AttackSettings | None
    ) -> Speed:
        """A pass of one attack, whose own work between passes counts, too; None: a clean one."""
        key = ("attack", model, section.norm, section.micro_batch, repr(settings))
        if key not in self._known:
            with self._threads(recipe.cluster.cpus_per_actor), using(EXACT):
                self._known[key] = self._attack(recipe, section, model, settings)
        found: Speed = self._known[key]
        return found

    def _attack(
        self, recipe: Recipe, section: AttackSection, name: str, settings: AttackSettings | None
    ) -> Speed:
        model, few = self._model(recipe, name), FEWER["num_steps"]
        flops = model_cost(recipe, name).flops * ascent(few).cost
        size = self._rows(rows_of_pass(section), flops)
        x = self._images(recipe, size).to(self.device).float() / 255
        logits_of = in_fixed_batches(model, size=size)
        with attack_mode(model), fast_forward(model.net):
            with torch.no_grad():
                labels = logits_of(x).argmax(dim=1)
                if settings is None:
                    return _timed(lambda: logits_of(x), device=self.device) / size
            items = Items(x, labels, numbered(size), run_seed=0)
            given = {f.name: getattr(settings, f.name) for f in fields(settings)}  # type: ignore[arg-type]
            fewer = {key: min(n, given[key]) for key, n in FEWER.items() if given.get(key)}
            eps = 1.0 if section.norm == "spatial" else HARMLESS
            attack = make_attack(_changed(settings, fewer), norm=section.norm, eps=eps)
            done: list[float] = []

            def run() -> None:
                result = attack(logits_of, items)
                done.append(float((result.num_evaluations + result.num_gradients).sum()))

            return _timed(run, device=self.device) / done[-1]

    def passes(self, recipe: Recipe, step: str, number: int) -> Speed:
        """A plain pass of one model of a suite or a study."""
        stage, _, part = step.partition(".")
        section: Any = recipe.evaluation() if stage == "evaluate" else recipe.analyze
        names = recipe.evaluation_parts()[part] if stage == "evaluate" else recipe.analyzed_models()
        key = ("passes", stage, names[number] if number < len(names) else number)
        if key not in self._known:
            with self._threads(recipe.cluster.cpus_per_actor), using(EXACT):
                if number < len(names):
                    name = names[number]
                    model, network = self._model(recipe, name), model_cost(recipe, name)
                else:
                    analyzed = stage == "analyze"
                    others = section.other_models if analyzed else section.transfer.models
                    folder = list(others.values())[number - len(names)]
                    model = self._folder_model(folder)
                    (network,) = folder_costs(step, {"other": folder})
                side = model.spec.image_size
                size = self._rows(section.micro_batch, network.flops)
                x = torch.rand(size, model.spec.channels, side, side, device=self.device)
                with attack_mode(model), fast_forward(model.net), torch.no_grad():
                    found = _timed(lambda: model(x), device=self.device)
                self._known[key] = found / size
        known: Speed = self._known[key]
        return known

    def corrupting(self, recipe: Recipe, num_items: int) -> Speed:
        """All variants of all items."""
        section = recipe.evaluation()
        assert section is not None
        assert section.corruptions is not None
        how = section.corruptions
        images = self._images(recipe, 2).permute(0, 2, 3, 1).contiguous()
        images = images.expand(-1, -1, -1, 3).contiguous()
        total = NO_SPEED
        with self._threads(recipe.cluster.cpus_per_actor):
            for name, severity in how.variants():
                one = lambda name=name, severity=severity: corrupt(  # noqa: E731
                    images, name=name, severity=severity, seed=0, item_ids=("a", "b")
                )
                total += _timed(one, device="cpu", seconds=0.02) / len(images)
        return total * num_items

    # Certificates

    def votes(self, recipe: Recipe, name: str) -> Speed:
        """A vote of a certificate."""
        entry = recipe.certificates()[name]
        key = ("votes", name, repr(entry.section))
        if key not in self._known:
            with self._threads(recipe.cluster.cpus_per_actor):
                self._known[key] = self._votes(recipe, name)
        found: Speed = self._known[key]
        return found

    def _votes(self, recipe: Recipe, name: str) -> Speed:
        settings = recipe.certificates()[name].section
        family, behind = family_of(settings.kind), recipe.certified_behind(settings)
        denoiser = settings.denoiser_name
        if behind is not None:
            denoiser = f"model:{self._random_model(recipe, behind) / 'model'}"
        model = self._model(recipe, settings.model)
        flops = model_cost(recipe, settings.model).flops
        x = self._images(recipe, self._rows(40, 16 * flops))
        changes: dict[str, object] = {"num_items": len(x)}
        if hasattr(settings, "block_size"):  # a unit may have thousands of draws
            size = settings.planned_micro_batch
            fitting = self._rows(settings.block_size, flops / 10) // size * size
            changes["block_size"] = max(fitting, size)
        data = MemoryDataset.of(x, torch.zeros(len(x)).long(), num_classes=model.spec.num_classes)
        request = VoteRequest(
            settings=_changed(settings, changes),
            key=f"certify.{name}",
            dataset=data,
            model=model,
            denoiser=denoiser,
            seed=0,
            device=self.device,
        )
        with using(EXACT):
            task = family.prepare(request, source=None)
            task = family.decided(task, family.decide(task))
            arithmetic.use(task.votes.arithmetic)
            header = family.header(task, data, num_items=len(x), run_id="random", software={})
            units = family.plan(task, request.settings, header).units
            worker, spent, count = family.worker(task), NO_SPEED, 0
            worker(units[0].payload)
            for unit in [*units[1:], units[0]]:
                wall, cpu = time.perf_counter(), time.process_time()
                table = worker(unit.payload)
                _finish(self.device)
                spent += Speed(time.perf_counter() - wall, time.process_time() - cpu)
                count += sum(map(len, table["predictions"].to_pylist()))
                if spent.wall > SECONDS:
                    break
        return spent / count

    # What all of them use

    def _dataset(self, recipe: Recipe, **counts: int) -> MadeDataset:
        side, num_classes = image_side(recipe), self._num_classes(recipe)
        splits = {"train": 0, "val": 0, "synthetic": counts.get("train", 0), **counts}
        return MadeDataset(
            classes=tuple(map(str, range(num_classes))),
            channels=known_channels(recipe.data) or 3,
            height=side,
            width=side,
            splits=splits,
        )

    def _num_classes(self, recipe: Recipe) -> int:
        return source_info(recipe.data).num_classes or NUM_CLASSES

    def _images(self, recipe: Recipe, count: int) -> Tensor:
        return replace(self._dataset(recipe), splits={"test": count}).open_split("test").images

    def _model(self, recipe: Recipe, name: str) -> PixelModel:
        """A model of the recipe with random weights."""
        key = ("model", name)
        if key not in self._known:
            if recipe.given_model():
                spec = ModelSpec.from_dict(given_spec(recipe) or {})
            else:
                data = self._dataset(recipe)
                spec = build.model_spec(recipe, data, name)  # type: ignore[arg-type]
            self._known[key] = initial_model(spec, seed=0).to(self.device).eval()
        found: PixelModel = self._known[key]
        return found

    def _folder_model(self, folder: str) -> PixelModel:
        spec = spec_of(Path(folder).expanduser())
        if spec is None:
            raise CasemateError("model", folder, "is not on this machine")
        return initial_model(ModelSpec.from_dict(dict(spec)), seed=0).to(self.device).eval()

    def _with_own_labels(self, model: PixelModel, split: ImageSplit) -> ImageSplit:
        """The items with the classes that the model gives them: all are attacked."""
        model.eval()
        with torch.no_grad():
            labels = model(split.pixels().to(self.device)).argmax(dim=1).cpu()
        return replace(split, labels=labels)

    def _counted(self, model: PixelModel, run: Any) -> Speed:
        """A pass, from a run whose passes are counted."""
        with counted_passes(model) as seen:
            run()
            before = seen.counts.cost
        return _timed(run, device=self.device, seconds=SECONDS / 3) / before

    @contextmanager
    def _threads(self, number: int) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(number)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _changed(settings: Any, values: Mapping[str, Any]) -> Any:
    return replace(settings, **values)


def _timed(run: Any, *, device: str, seconds: float = SECONDS / 3) -> Speed:
    """Time of a run, after a first one: the median of as many as there is time for."""
    run()
    walls: list[float] = []
    cpus: list[float] = []
    began = time.perf_counter()
    while not walls or (time.perf_counter() - began < seconds and len(walls) < 50):
        _finish(device)
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        _finish(device)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return Speed(float(np.median(walls)), float(np.median(cpus)))


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def measured_in(recipe: Recipe) -> Iterator[MeasuredHere]:
    """A laboratory with a folder for what work reads from disk."""
    with tempfile.TemporaryDirectory(prefix="casemate-") as name:
        yield MeasuredHere(recipe, Path(name))
