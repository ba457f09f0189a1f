"""Ready recipes: each one loads, is free of warnings, and resolves to its reviewed snapshot.

A changed default or recipe shows up here as a changed snapshot. To renew them after review:
`CASEMATE_RENEW_SNAPSHOTS=1 pytest tests/recipes`.
"""

import os
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import yaml

from pipelines.recipe.lint import ABSENT, warnings_of
from pipelines.recipe.load import available, find, headline, load, loads, with_values
from pipelines.recipe.smoke import MADE_DENOISER

SNAPSHOTS = Path(__file__).parent / "snapshots"
RENEW = "renew with CASEMATE_RENEW_SNAPSHOTS=1 pytest tests/recipes, and review the difference"


@pytest.mark.parametrize("name", available())
def test_resolved_recipe_equals_its_snapshot(name):
    snapshot = SNAPSHOTS / f"{name}.yaml"
    found = load(name).to_yaml()
    if os.environ.get("CASEMATE_RENEW_SNAPSHOTS"):
        snapshot.write_text(found, encoding="utf-8")
    assert snapshot.is_file(), f"no snapshot of {name}: {RENEW}"
    assert found == snapshot.read_text(encoding="utf-8"), RENEW


def test_no_snapshot_outlives_its_recipe():
    assert sorted(path.stem for path in SNAPSHOTS.glob("*.yaml")) == available()


@pytest.mark.parametrize("name", available())
def test_ready_recipe_survives_yaml(name):
    recipe = load(name)
    again = loads(recipe.to_yaml(), source=name)
    assert again == recipe
    assert again.digest() == recipe.digest()


@pytest.mark.parametrize("name", available())
def test_ready_recipe_has_no_warnings(name):
    found = warnings_of(load(name))
    assert [w for w in found if ABSENT not in w.message] == []  # users bring denoisers themselves


@pytest.mark.parametrize("name", available())
def test_ready_recipe_says_what_it_is(name):
    assert load(name).name == name
    assert len(headline(name)) > 20
    text = find(name).read_text(encoding="utf-8")
    said = [line[2:10].rstrip(" :") for line in text.splitlines() if line.startswith("# ")]
    if name != "demo":
        assert [word for word in ("Paper", "Figures", "Run", "Differs") if word not in said] == []
        assert f" {name} " in text.replace("\n", " ").split("name: ")[0]  # in its own command
    written = yaml.safe_load(text)
    assert not written.keys() & {"cluster", "storage", "tracking"}  # where it runs is the user's


def numbers(values, *, path=()):
    """Every number of a nested value by its path."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from numbers(value, path=(*path, key))
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield path, values


@pytest.mark.parametrize("name", available())
def test_smoke_shrinks_and_keeps_the_chain(name):
    full, smoke = load(name), load(name, smoke=True)
    given = set(full.analyze.other_models) if full.analyze else set()  # trained instead
    assert set(smoke.model_names()) - {MADE_DENOISER} == set(full.model_names()) | given
    assert smoke.attack.keys() == full.attack.keys()
    assert smoke.certify.keys() == full.certify.keys()
    assert smoke.data.limits.keys() - {"synthetic"} == {"train", "val", "test"}
    assert sum(smoke.data.limits.values()) <= 264 + 96
    assert smoke.data.source in ("mnist5k", "made")  # nothing that is not here
    assert smoke.model.pretrained is None
    assert smoke.digest() != full.digest()
    before = dict(numbers(full.resolved()))
    grown = {path for path, value in numbers(smoke.resolved()) if value > before.get(path, value)}
    assert not grown
    sizes = [c.num_items for c in [*smoke.attack.values(), *smoke.certify.values()]]
    assert all(size is not None and size <= 16 for size in sizes)


# Keys whose null says something; any other null would be a value that nobody filled in.
MEANINGFUL = {
    *("data.path", "data.resize", "data.image_size", "data.channels", "data.train_size"),
    *("data.synthetic", "model.upsample", "model.mean", "model.std", "model.pretrained"),
    *("train.average", "train.clip_norm", "train.micro_batch", "train.patience", "train.val_eps"),
    *("train.warmup_start", "train", "tune", "tune.epochs", "report.title"),
    # wherever they are
    *("awp", "aas", "step_size", "floor", "every", "max_batches", "range", "model", "epochs"),
    *("rand_augment", "train_items", "num_items", "band", "challenge", "curves", "surrogate"),
    *("kappa", "num_steps", "num_queries", "search", "sweep", "denoiser"),
    *("address", "num_cpus", "num_actors", "checkpoint_steps", "uri", "experiment"),
    # the evaluate section: switched off, suites that are not run, and their choices
    *(
        "evaluate",
        "evaluate.corruptions",
        "evaluate.shape_bias",
        "evaluate.transfer",
        "evaluate.spatial",
    ),
    "evaluate.corruptions.path",
    *("evaluate.models", "item_ids", "fidelity", "textures", "resample", "grid", "fit", "resize"),
    # the analyze section: studies that are not made, and choices that follow from the network
    *("analyze.correlation", "analyze.lesions", "analyze.restricted_attention", "analyze.gaps"),
    *("analyze.perturbations", "analyze.accumulation", "analyze.models", "analyze.blocks.names"),
    *("analyze.blocks.num_prefix_tokens", "measure", "estimator", "parts", "counts", "what"),
    *("distances", "depths", "patch_size"),
}


def nulls(values, *, path=()):
    """The dotted keys of all nulls; entries of lists count by the list."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from nulls(value, path=(*path, key))
    elif isinstance(values, list):
        for value in values:
            yield from nulls(value, path=path)
    elif values is None:
        own = path[:2] == ("train", "variants") and path[3:4] == ("model",)  # a variant's network
        yield ".".join(path[3:] if own else path)


@pytest.mark.parametrize("name", available())
def test_no_value_is_missing(name):
    recipe = load(name)
    found = {
        key
        for key in nulls(recipe.resolved())
        if key not in MEANINGFUL and key.rpartition(".")[2] not in MEANINGFUL
    }
    assert not found
    assert recipe.data.source == "mnist5k" or recipe.data.path
    if recipe.data.source.startswith("imagenet"):
        assert recipe.data.image_size  # files of all sizes
    if not recipe.model.pretrained and recipe.model.architecture not in ("unet", "tiny_vit"):
        assert recipe.model.mean
        assert recipe.model.std


@pytest.mark.parametrize("name", available())
def test_full_batches_can_be_filled(name):
    """Asked of the full recipe: shrinking rounds the batch and would hide a wrong one."""
    train = load(name).train
    assert train.batch_size % (2 * train.augment.copies) == 0


def points(space):
    return [dict(zip(space, values, strict=True)) for values in product(*space.values())]


def test_the_augmentation_search_has_16_sets_for_each_objective():
    space = load("in100-aug").tune.space
    augment = [key for key in space if key.startswith("train.augment.")]
    found = Counter(str(point["train.objective"]) for point in points(space))
    assert sorted(found.values()) == [16, 16]
    assert len({tuple(point[key] for key in augment) for point in points(space)}) == 16
    parts = [{bool(value) for value in space[key]} for key in augment]
    assert parts == [{False, True}] * 4  # each part is off or on


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("in100-arch", 6),
        ("in100-epswarm", 5),
        ("in100-aug", 32),
        ("in100-wd", 14),
        ("in100-steps", 3),
        ("ft-cifar10-search", 24),
        ("aas-period", 6),
    ],
)
def test_searches_have_their_published_sizes_and_valid_points(name, size):
    recipe = load(name)
    trials = points(recipe.tune.space)
    assert len(trials) == size
    for values in trials:
        with_values(recipe, values)


def test_the_chain_of_changes_ends_with_the_full_recipe():
    chain, full = load("in1k-step"), load("in1k-eps4-s12")
    assert len(chain.tune.changes) == 5
    values = {}
    for change in chain.tune.changes:
        values |= change.set
    last = with_values(chain, values)
    assert last.model.architecture == full.model.architecture
    for key in ("objective", "augment", "weight_decay", "epochs", "learning_rate"):
        assert getattr(last.train, key) == getattr(full.train, key)


def test_smoke_caps_what_was_left_open():
    text = """
    name: open
    data: {source: digits, limits: {train: 50}}
    train: {epochs: 300}
    attack:
      linf:
        eps: 0.1
        attacks: [{kind: autoattack}, {kind: aas, inner: {kind: pgd}}]
        curves: {steps: [1, 3, 10, 100]}
    certify: {l2: {kind: gaussian, sigma: 0.25, block_size: 1000, micro_batch: 40}}
    """
    smoke = loads(text, source="open", smoke=True)
    attack = smoke.attack["linf"]
    assert attack.num_items == attack.sanity.num_items == attack.curves.num_items == 16
    assert (attack.attacks[0].num_steps, attack.attacks[0].num_queries) == (3, 50)
    assert attack.attacks[1].inner.num_steps == 3  # sections inside lists shrink, too
    assert attack.curves.steps == [1, 3]
    assert smoke.data.limits["train"] == 50  # what is smaller stays
    assert smoke.train.epochs == 2
    assert smoke.certify["l2"].block_size == 80  # the largest multiple of 40 below the cap
