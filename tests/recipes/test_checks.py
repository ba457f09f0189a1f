"""The gate refuses what workers would notice late: for lint and for every run."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from components.core.errors import CasemateError
from pipelines.cli.main import app
from pipelines.flow import execute as runner
from pipelines.recipe.check import check
from pipelines.recipe.facts import Facts
from pipelines.recipe.lint import warnings_of
from pipelines.recipe.load import loads
from tests.recipes.sections import certified_by
from tests.refusals import refusal_of

BASE = """\
name: x
data: {source: digits, image_size: 8}
train:
  variants: {noisy: {objective: {kind: gaussian, sigma: 0.25}}}
"""
UNKNOWN_SIDE = ("data.image_size=null", "data.source=npz", "data.path=x.npz")
RESNET = "model.architecture=resnet18"
SIZES = [
    (["train.objective={kind: columns, band: 400}"], "train.objective.band: 400"),
    (["train.objective={kind: ablation, size: 9}"], "train.objective.size: 9"),
    (
        ["train.variants.noisy.objective={kind: ablation, shape: block, size: 9}"],
        "train.variants.noisy.objective.size: 9",
    ),
    ([certified_by("kind: columns, band: 2, patch_sizes: [1, 9]")], "certify.p.patch_sizes: 9"),
    ([certified_by("kind: rows, band: 9, patch_sizes: [1]")], "certify.p.band: 9"),
    ([certified_by("kind: blocks, band: 2, stride: 9, patch_sizes: [1]")], "certify.p.stride: 9"),
    (
        [certified_by("kind: columns, patch_sizes: [1], sweep: {band: [2, 9]}")],
        "certify.p.sweep.band: 9",
    ),
    (
        [certified_by("kind: double_masking, mask_patch: 9, patch_sizes: [1]")],
        "certify.p.mask_patch: 9",
    ),
]
OTHERS = [
    (
        ["train.batch_size=6", "train.augment.mixup=0.8", "cluster.train_workers=2"],
        "train.batch_size: 6 leaves a worker 3 images; mixing needs pairs",
    ),
    (
        ["model.options={patchsize: 4}"],
        "model.options: {'patchsize': 4} do not fit tiny_vit at 8px: ",
    ),
    (
        ["train.variants.noisy.model={architecture: tiny_vit, options: {depth: 0}}"],
        "train.variants.noisy.model.options.depth: 0 must be at least 1",
    ),
    (
        ["train.learning_rate=0.001", "train.schedule={kind: cosine, floor: 0.0011}"],
        "train.schedule.floor: 0.0011 is above the learning rate, which comes to 0.001",
    ),
    (
        [
            *("train.learning_rate=0.002", "train.rate_rule=linear", "train.batch_size=256"),
            "train.schedule={kind: cosine, floor: 0.0011}",
        ],
        "train.schedule.floor: 0.0011 is above the learning rate, which comes to 0.001",
    ),
    (["model.architecture=nosuchnet"], "model.architecture: nosuchnet is unknown here and in timm"),
    (["train.augment.rand_augment=foo"], "train.augment.rand_augment: foo is not a RandAugment"),
    (
        [RESNET, "train.objective={kind: pgd, eps: 0.1, aas: {}}"],
        "train.objective.aas: resnet18 gives no access to blocks and attention",
    ),
    (
        [RESNET, "attack={l: {eps: 0.1, attacks: [{kind: aas, inner: {kind: pgd}}]}}"],
        "attack.l.attacks.0: resnet18 gives no access to blocks and attention",
    ),
    (
        ["certify={r: {kind: rows, patch_sizes: [2]}}"],
        "certify.r.band: is needed: model main was not trained on rows",
    ),
]


@pytest.mark.parametrize(("overrides", "line"), [*SIZES, *OTHERS])
def test_a_recipe_that_no_worker_could_run_is_refused(overrides, line):
    recipe = loads(BASE, source="x", overrides=overrides)
    for ask in (check, warnings_of):
        assert refusal_of(ask, recipe).startswith(f"x: {line}")


@pytest.mark.parametrize(("overrides", "line"), SIZES)
def test_sizes_are_asked_of_prepared_images_where_the_recipe_has_none(overrides, line):
    recipe = loads(BASE, source="x", overrides=[*overrides, *UNKNOWN_SIDE])
    check(recipe)
    check(recipe, Facts(height=400, width=400))  # as large as what is asked for
    small = Facts(height=8, width=8)
    assert refusal_of(check, recipe, small) == f"x: {line} is larger than the image (8)"


@pytest.mark.parametrize(("overrides", "line"), SIZES)
def test_sources_of_one_size_need_none_in_the_recipe(overrides, line):
    recipe = loads(BASE, source="x", overrides=[*overrides, "data.image_size=null"])
    assert refusal_of(check, recipe) == f"x: {line} is larger than the image (8)"


@pytest.mark.parametrize(
    ("axis", "line"),
    [
        ("train.objective={kind: columns, band: 400}", "train.objective.band: 400"),
        ("train.augment.rand_augment=foo", "train.augment.rand_augment: foo"),
        ("model.architecture=nosuchnet", "model.architecture: nosuchnet"),
    ],
)
def test_every_trial_of_a_search_is_asked(axis, line):
    key, _, value = axis.partition("=")
    tune = f"tune={{space: {{{key}: [{value}]}}, metric: val_accuracy}}"
    assert line in refusal_of(warnings_of, loads(BASE, source="x", overrides=[tune]))


def test_a_run_asks_before_it_trains(monkeypatch):
    """Prepared images come first, and no training may begin on images that are too small."""
    recipe = loads(BASE, source="x", overrides=[*SIZES[0][0], *UNKNOWN_SIDE])
    monkeypatch.setattr(
        "components.data.prepared.PreparedDataset.open",
        lambda _: SimpleNamespace(
            height=8, width=16, channels=1, classes=["a", "b"], splits={"train": 3, "val": 3}
        ),
    )
    steps = {"prepare": SimpleNamespace(folder=None)}
    work = runner._Runner(recipe, tracker=None, parent=None, steps=steps)
    monkeypatch.setattr(work, "run_step", lambda _: pytest.fail("trained"))
    training = SimpleNamespace(step=SimpleNamespace(stage="train"))
    with pytest.raises(CasemateError, match=r"^x: train.objective.band: 400 is larger"):
        work.run_stage([training])


def test_what_fits_passes():
    fits = ["train.objective={kind: columns, band: 8}"]
    fits += [certified_by("kind: columns, patch_sizes: [8], stride: 8")]
    fits += ["train.learning_rate=0.001", "train.schedule={kind: cosine, floor: 0.001}"]
    fits += ["model.options={patch_size: 4}"]
    check(loads(BASE, source="x", overrides=fits))


def test_smoke_lowers_a_floor_with_the_rate():
    """A rate that follows the batch shrinks with it, and a floor that was below must not refuse."""
    rule = ["train.learning_rate=0.001", "train.rate_rule=linear", "train.batch_size=512"]
    floor = ["train.schedule={kind: cosine, floor: 0.0005}"]
    check(loads(BASE, source="x", overrides=[*rule, *floor]))
    check(loads(BASE, source="x", overrides=[*rule, *floor], smoke=True))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (SIZES[0][0][0], ": train.objective.band: 400 is larger"),
        ("tune={space: {train.epochs: [-1]}, metric: val_accuracy}", ": tune.space.train.epochs"),
    ],
)
def test_lint_names_the_file_of_what_checks_refuse(tmp_path, override, line):
    path = tmp_path / "my.yaml"
    path.write_text(BASE)
    result = CliRunner().invoke(app, ["lint", str(path), "--set", override])
    assert isinstance(result.exception, CasemateError)
    assert str(result.exception).startswith(f"{path}{line}")
