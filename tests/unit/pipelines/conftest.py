"""A trained tiny transformer on digits, and the attack stage without Ray around it."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from components.data.fitting import Fitting
from components.data.prepared import PreparedDataset
from components.data.shards import describe_dataset, open_job, plan_shards, write_shard
from components.data.sources import open_source
from components.data.sources.base import Source
from components.data.splits import SPLITS, assign_splits
from components.models.checkpoint import save_model
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from pipelines.recipe.load import parse
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.leases import work_off
from pipelines.runtime.shards import _Counted, further, unfinished
from pipelines.runtime.storage import Storage
from pipelines.stages.attack import stage as attack
from pipelines.stages.certify import challenge
from pipelines.stages.certify import stage as certify
from pipelines.stages.evaluate import evaluation
from pipelines.stages.registry import STAGES

EPS = 0.1
NUM_ITEMS = 40
OPTIONS = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """Digits in the prepared format, written by the real writers."""
    folder = tmp_path_factory.mktemp("digits")
    limits = {"train": 800, "val": 20, "test": NUM_ITEMS}
    write_prepared(folder, open_source("digits", path=None), Fitting(), limits=limits)
    return folder


def write_prepared(
    folder: Path, source: Source, fitting: Fitting, *, shard_size: int = 1024, **splitting: Any
) -> None:
    """A dataset in the prepared format."""
    splits = assign_splits(
        source.entries(), classes=source.classes, seed=3, val_fraction=0.1, test_fraction=0.2,
        **{"limits": {}, "test_only": source.test_only, **splitting},
    )  # fmt: skip
    plans = plan_shards(splits, shard_size=shard_size)
    entries = [entry for plan in plans for entry in plan.entries]
    job = open_job(source, entries, folder=folder, fitting=fitting, on_error="fail")
    text = describe_dataset(
        [write_shard(job, plan) for plan in plans], classes=source.classes, shape=job.shape,
        split_names=SPLITS, source={"name": "digits"},
    )  # fmt: skip
    (folder / "dataset.json").write_text(text)


def train(
    prepared: Path,
    *,
    seed: int = 0,
    num_epochs: int,
    eps: float = 0.0,
    sigma: float = 0.0,
    **spec: Any,
) -> PixelModel:
    """A few epochs of training, against FGSM or under noise."""
    torch.manual_seed(seed)
    model = PixelModel(ModelSpec("tiny_vit", 10, 1, 8, (0.5,), (0.5,), options=OPTIONS, **spec))
    split = PreparedDataset.open(prepared).load("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(num_epochs):
        for rows in torch.randperm(len(split)).split(50):
            x, y = split.pixels(rows), split.labels[rows]
            if eps:
                x = (x + eps * (2 * torch.rand_like(x) - 1)).clamp(0, 1).requires_grad_()
                (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
                x = (x + eps * slope.sign()).clamp(0, 1).detach()
            if sigma:
                x = x + sigma * torch.randn_like(x)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


@pytest.fixture(scope="session")
def models(tmp_path_factory, prepared) -> dict[str, Path]:
    """Folders as training leaves them: `model/` inside; half of the items stand a PGD of `EPS`."""
    root = tmp_path_factory.mktemp("models")
    for name, seed, eps in (("main", 0, EPS / 2), ("plain", 1, 0.0)):
        model = train(prepared, seed=seed, num_epochs=10, eps=eps)
        save_model(root / name / "model", model, recipe_digest="")
    return {name: root / name for name in ("main", "plain")}


@dataclass
class FakeRun:
    """What MLflow would have been told."""

    run_id: str = "run-1"
    logged: dict[str, float] = field(default_factory=dict)
    tagged: dict[str, object] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    registered: list[dict[str, Any]] = field(default_factory=list)

    def metrics(self, values: dict[str, float], *, trained_in: str | None = None) -> None:
        self.logged |= values

    def model_results(self, trained_in: str | None, *, metrics: dict, tags: dict) -> None:
        """Figures and tags of the model; `trained_in` is the run that trained it."""

    def tags(self, values: dict[str, object]) -> None:
        self.tagged |= values

    def artifacts(self, *paths: Path) -> None:
        self.files += [path.name for path in paths]

    def register_smoothed(self, **model: Any) -> None:
        self.registered.append(model)


class InProcess:
    """The executor's contract without Ray: missing units in any order, each a durable part."""

    def __init__(self, order: Callable[[list[Any]], list[Any]] = list, *, room: int = 1) -> None:
        self.order, self.room, self.done = order, room, []  # room: units asked for at once
        self.stop_after: int | None = None
        self.so_far = []  # intermediate results after every unit

    def __call__(
        self, units, *, make, config, parts, cluster, label="", source=None, out=None, phase=""
    ) -> None:
        source = source or _Counted(units)
        plan = parts.plan([unit.name for unit in units])
        todo = self.order(unfinished(units, plan, source))
        work = make(config)
        while todo := todo + self.order(self._further(source, plan, self.room - len(todo))):
            unit = todo.pop(0)
            if self.stop_after is not None and len(self.done) >= self.stop_after:
                raise KeyboardInterrupt
            self._compute(unit, work, plan, source)
            self.done.append(unit.name)
            self.so_far.append(source.so_far())

    @staticmethod
    def _further(source, plan, room):
        return further(source, plan, room=room, ahead=room)

    @staticmethod
    def _compute(unit, work, plan, source) -> None:
        outcome = work_off(
            lambda: work,
            [unit.payload],
            write=partial(plan.writer.write, [unit.name], plan.ordinals_of([unit.name])),
            brief=source.brief,
        )
        if outcome.error:
            raise outcome.error
        plan.add(outcome.group, outcome.num_bytes, [unit.name])
        source.keep(unit, outcome.briefs and outcome.briefs[0])


@pytest.fixture(scope="session")
def run_attack(prepared, models, tmp_path_factory):
    """The stage on these models, or on `folders`; returns its folder and what was logged."""

    def run(section: dict, *, out: Path | None = None, executor=None, folders=None) -> StageDir:
        recipe = parse(
            {
                "name": "x",
                "seed": 5,
                "data": {"source": "digits"},
                "train": {"variants": {"plain": {"objective": {"kind": "standard"}}}},
                "attack": {"a": {"eps": EPS, "sanity": None, **section}},
            },
            source="x",
        )
        steps = {f"train.{m}": path for m, path in (folders or models).items()}
        inputs = {"prepare": prepared, **steps}
        place = out or tmp_path_factory.mktemp("attack")
        folder = StageDir(place, "attack.a", "f" * 64, FakeRun(), inputs)
        with mock.patch.object(attack, "run_units", executor or InProcess()):
            attack.run(recipe, inputs, folder)
        return folder

    return run


def certify_in_process(
    section: dict[str, Any],
    inputs: dict[str, Path],
    place: Path,
    *,
    part: str = "p",
    executor: InProcess | None = None,
) -> StageDir:
    """The stage without Ray, for a recipe with one section of certificates called `p`."""
    recipe = parse(
        {"name": "x", "seed": 5, "data": {"source": "digits"}, "train": {},
         "certify": {"p": section}},
        source="x",
    )  # fmt: skip
    out = StageDir(place, f"certify.{part}", "f" * 64, FakeRun(), inputs)
    work = executor or InProcess()
    with (
        mock.patch.object(certify, "run_units", work),
        mock.patch.object(challenge, "run_units", work),
    ):
        certify.run(recipe, inputs, out)
    return out


@pytest.fixture(scope="session")
def run_step(prepared, models, tmp_path_factory) -> Callable[..., StageDir]:
    """Runs one step of evaluate or analyze on two models, without Ray; returns its folder."""

    def run(
        stage: str, part: str, section: dict, *, out=None, executor=None, further=None
    ) -> StageDir:
        values = {
            "name": "x",
            "seed": 5,
            "data": {"source": "digits"},
            "train": {"variants": {"plain": {"objective": {"kind": "standard"}}}},
            stage: {"micro_batch": 8, **section},
        }
        steps = {f"train.{name}": folder for name, folder in models.items()}
        inputs = {"prepare": prepared, **steps, **(further or {})}
        place = out or tmp_path_factory.mktemp(stage)
        folder = StageDir(place, f"{stage}.{part}", "f" * 64, FakeRun(), inputs)
        with (
            mock.patch.object(evaluation, "run_units", executor or InProcess()),
            mock.patch.object(evaluation, "ITEMS_PER_UNIT", 16),
        ):
            STAGES[stage].load().run(parse(values, source="x"), inputs, folder)
        return folder

    return run


@pytest.fixture(params=["folder", "bucket"])
def storage(request, tmp_path) -> Storage:
    """An empty storage of each kind."""
    if request.param == "bucket":
        return Storage.at(request.getfixturevalue("s3_root"))
    (tmp_path / "runs").mkdir()
    return Storage.at(tmp_path / "runs")


@pytest.fixture
def flow(finished, tmp_path) -> Path:
    """A copy of the module's finished flow, to spoil."""
    return shutil.copytree(finished, tmp_path / "runs" / "demo")
