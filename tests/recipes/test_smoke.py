"""`--smoke`: every ready recipe, shrunk, trains each of its models here and now, without Ray."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from components.data.fitting import Fitting
from components.data.prepared import PreparedDataset
from components.data.shards import describe_dataset, plan_shards, write_shard
from components.models.checkpoint import save_model
from pipelines.recipe import build
from pipelines.recipe import smoke as smoking
from pipelines.recipe.load import available, load, loads, shrink
from pipelines.stages.prepare.stage import list_splits, open_jobs, open_sources
from pipelines.stages.train.session import make_session

NAMES = [name for name in available() if name != "demo"]  # the demo runs whole, end to end


def training(recipe) -> str:
    """What a shrunk recipe trains, whatever its rates and budgets: one of a kind is tried."""
    values = recipe.resolved()
    text = json.dumps([values[key] for key in ("data", "model", "train")], sort_keys=True)
    return json.dumps(json.loads(text, parse_float=lambda _: 0.0))


@cache
def shrunk(name):
    return load(name, smoke=True)


def distinct() -> list[str]:
    first = {}
    for name in NAMES:
        first.setdefault(training(shrunk(name)), name)
    return list(first.values())


def prepare_here(recipe, folder: Path) -> PreparedDataset:
    """The prepare stage's own functions, one shard after the other in this process."""
    data, fitting = (
        recipe.data,
        Fitting(recipe.data.image_size, recipe.data.fit, recipe.data.channels, recipe.data.resize),
    )
    source, generated = open_sources(data)
    splits = list_splits(data, source, generated)
    plans = plan_shards(splits, shard_size=data.shard_size)
    jobs = open_jobs(data, source, generated, plans, fitting=fitting, folder=folder)
    text = describe_dataset(
        [write_shard(jobs[plan.split], plan) for plan in plans],
        classes=source.classes,
        shape=jobs["test"].shape,
        split_shapes={split: job.shape for split, job in jobs.items()},
        split_names=tuple(splits),
        source={"name": data.source},
    )
    (folder / "dataset.json").write_text(text)
    return PreparedDataset.open(folder)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Prepared datasets by their data section: many recipes share one."""
    made: dict[str, PreparedDataset] = {}

    def get(recipe) -> PreparedDataset:
        key = str(recipe.data)
        if key not in made:
            made[key] = prepare_here(recipe, tmp_path_factory.mktemp("data"))
        return made[key]

    return get


def placed(recipe, model: str, root: Path):
    """As the train stage hands it to its workers: denoisers of the recipe by their folders."""
    needed = recipe.denoiser_of(model)
    return build.with_absolute_paths(recipe, {f"train.{needed}": root / needed} if needed else {})


def sampled(names: list[str]) -> list[object]:
    """Every third; the others run with the longer tests."""
    marks = pytest.mark.cluster
    return [n if i % 3 == 0 else pytest.param(n, marks=marks) for i, n in enumerate(names)]


@pytest.mark.parametrize("name", sampled(distinct()))
def test_every_model_trains_for_an_epoch(name, datasets, tmp_path):
    recipe = shrunk(name)
    dataset = datasets(recipe)
    for model in sorted(recipe.model_names(), key=lambda m: m not in recipe.denoisers()):
        session = make_session(placed(recipe, model, tmp_path), model, dataset)
        assert sum(p.numel() for p in session.model.parameters()) < 300_000
        row = session.run_epoch()
        assert row["loss"] > 0
        figure = "val_mse" if model in recipe.denoisers() else "val_accuracy"
        assert 0 <= row[figure] <= 1
        save_model(tmp_path / model / "model", session.final_model(), recipe_digest="")


def smoke_of(text: str, *overrides: str):
    """The shrunk form of a small recipe, and the line that was said about it."""
    return shrink(loads(text, source="small", overrides=overrides))


PHOTOS = """
name: photos
data: {source: imagenet, path: nowhere/imagenet, image_size: 224, fit: crop, resize: 256}
model: {architecture: deit_tiny_patch16_224, token_policy: drop, pretrained: timm}
train:
  objective: {kind: columns, band: 19}
  batch_size: 512
  augment: {crop: pad, pad: 28}
certify:
  patch: {kind: columns, patch_sizes: [23, 32, 39], stride: 7, challenge: {patch_size: 32}}
"""


def test_what_is_replaced_is_said_in_one_line(caplog):
    smoke_of(PHOTOS)
    (record,) = caplog.records
    assert record.getMessage() == (
        "smoke: generated images instead of imagenet: no nowhere/imagenet here; "
        "fresh weights instead of timm"
    )


def test_the_line_reaches_stderr(tmp_path):
    path = tmp_path / "photos.yaml"
    path.write_text(PHOTOS)
    code = "import sys; from pipelines.cli.main import main; sys.argv[0] = 'casemate'; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "recipes", str(path), "--smoke"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr.splitlines() == [
        "smoke: generated images instead of imagenet: no nowhere/imagenet here; "
        "fresh weights instead of timm"
    ]
    assert loads(result.stdout, source="stdout") == smoke_of(PHOTOS)


def test_nothing_is_said_where_nothing_is_replaced(caplog):
    load("demo", smoke=True)
    assert not caplog.records


def test_lengths_follow_the_images():
    small = smoke_of(PHOTOS)
    assert (small.data.image_size, small.data.resize) == (64, 73)
    assert small.train.objective.band == round(19 * 64 / 224)
    certify = small.certify["patch"]
    assert (certify.patch_sizes, certify.stride) == ((7, 9, 11), 2)
    assert certify.challenge.patch_size == 9
    assert small.train.augment.pad == 8
    assert small.train.batch_size == 16


def test_files_that_are_here_are_used(tmp_path):
    here = smoke_of(PHOTOS, f"data.path={tmp_path}")
    assert (here.data.source, here.data.path) == ("imagenet", str(tmp_path))
    assert here.data.limits["train"] == 2000  # every class keeps some
    assert here.data.image_size == 64


def test_a_given_model_keeps_its_images(tmp_path):
    text = f"""
    name: given
    data: {{source: imagenet, path: nowhere, image_size: 224, fit: crop}}
    model: {{pretrained: {tmp_path}}}
    attack: {{linf: {{eps: 4/255, attacks: [{{kind: pgd}}]}}}}
    """
    given = smoke_of(text)
    assert (given.data.source, given.data.image_size) == ("imagenet", 224)
    assert given.model.pretrained == str(tmp_path)
    assert given.attack["linf"].num_items == 16


TUNE = """
name: search
data: {source: digits}
train: {objective: {kind: fgsm, eps: 0.1}}
tune: {space: {train.weight_decay: [0, 0.1, 0.5]}}
"""


@pytest.mark.parametrize(
    ("space", "left"),
    [
        ({"train.weight_decay": [0, 0.1, 0.5]}, {"train.weight_decay": [0, 0.1]}),
        (
            {"train.objective.eps_warmup_epochs": [0, 5, 10, 20]},
            {"train.objective.eps_warmup_epochs": [0, 1]},  # capped ones are the same trial
        ),
        (
            {"train.weight_decay": [0, 1, 2], "train.learning_rate": [1, 2], "seed": [1, 2]},
            {"train.weight_decay": [0, 1], "train.learning_rate": [1, 2], "seed": [1]},
        ),
        (
            {"model.architecture": ["resnet18", "deit_tiny_patch16_224", "cait_s24_224"]},
            {"model.architecture": ["deit_tiny_patch16_224", "cait_s24_224"]},
        ),
    ],
)
def test_few_trials_are_left(space, left):
    model = {"architecture": "xcit_nano_12_p16_224", "options": {}}
    values = {"model": model, "tune": {"space": space, "changes": []}}
    smoking._shrink_tune(values, smoking.CAPS, [])
    assert values["tune"]["space"] == left


def test_a_chain_of_changes_keeps_its_beginning():
    steps = [{"name": str(n), "set": {"train.epochs": n}} for n in range(1, 6)]
    steps[1]["set"] = {"model.architecture": "resnet18"}
    small = smoke_of(
        TUNE.replace("tune: {space: {train.weight_decay: [0, 0.1, 0.5]}}", ""),
        f"tune={{changes: {json.dumps(steps)}}}",
    )
    assert [change.name for change in small.tune.changes] == ["1", "2", "3"]
    assert small.tune.changes[1].set["model.options"] == smoking.NETWORKS[r"(wide_)?resnet\d"]
    assert small.tune.changes[2].set["train.epochs"] == 2


def test_own_images_keep_every_class(tmp_path):
    """More classes than the usual number of training items of a smoke."""
    from tests.image_folders import class_folders

    class_folders(tmp_path, {f"c{n:03d}": 1 for n in range(210)}, height=8, width=8)
    values = {"name": "own", "data": {"source": "folder", "path": str(tmp_path)}}
    recipe = loads(json.dumps({**values, "train": {}}), source="own", smoke=True)
    assert recipe.data.limits["train"] == 420
