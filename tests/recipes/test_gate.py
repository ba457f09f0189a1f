"""The gate: what it refuses, in which form, and that reading a recipe is bounded."""

import json
import pickle
import random
import re
import subprocess
import sys
import time

import pytest
import yaml

from components.core.errors import CasemateError
from components.core.problems import RecipeError
from pipelines.recipe import check as gate
from pipelines.recipe import check_networks
from pipelines.recipe.check import check
from pipelines.recipe.facts import Facts
from pipelines.recipe.load import load, loads, parse
from tests.recipes.sections import certified_by
from tests.refusals import refusal_of

BASE = """\
name: x
data: {source: digits, image_size: 8}
model: {options: {patch_size: 4, embed_dim: 32, depth: 1, num_heads: 2}}
train: {}
"""
TWO_CLASSES = "data={source: made, options: {classes: 2, image_size: 8}}"
MANY_DRAWS = "kind: gaussian, sigma: 0.25, num_estimate: 1000000"
DLR = "attack={l: {eps: 0.1, attacks: [{kind: pgd, loss: dlr}]}}"
PHOTOS = "data={source: imagenet, path: somewhere, image_size: 224, fit: resize}"


def refusal(*overrides: str, text: str = BASE, facts: Facts | None = None) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        check(loads(text, source="my.yaml", overrides=overrides), facts)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["train.batch_size=10", "cluster.train_workers=4"],
            "train.batch_size: 10 is not divisible by cluster.train_workers 4",
        ),
        (["model.mean=[0.5, 0.5, 0.5]"], "model.mean: [0.5, 0.5, 0.5] needs 1 entries, one per"),
        (["model.upsample=4"], "model.upsample: 4 is below the image side 8: "),
        (["model.upsample_mode=bilinear"], "model.upsample_mode: bilinear does nothing without"),
        (
            [certified_by("kind: columns, band: 2, patch_sizes: [1], token_policy: drop")],
            "certify.p.token_policy: drop is not the training policy of model main (mask) and ",
        ),
        (
            [certified_by("kind: columns, band: 2, patch_sizes: [1], precision: float16")],
            "certify.p.precision: float16 needs GPUs; set cluster.gpus_per_actor, or use float32",
        ),
        (
            [certified_by("kind: gaussian, sigma: 0.25, precision: tf32")],
            "certify.p.precision: tf32 needs GPUs; set cluster.gpus_per_actor, or use float32",
        ),
        (
            [certified_by("kind: gaussian, sigma: 0.25, micro_batch: many")],
            "certify.p.micro_batch: 'many' is not a whole number or 'auto'",
        ),
        ([TWO_CLASSES, DLR, "model.options={}"], "attack.l.attacks.pgd-20-dlr: 2 classes are too"),
        (
            [
                PHOTOS,
                "model.options={}",
                "certify={l2: {kind: gaussian, sigma: 0.25, num_estimate: 1000000}}",
            ],
            "certify.l2.num_items: 50000 would make 50,005,000,000 predictions; ",
        ),
        (["data.image_size=6"], "data.image_size: 6 is smaller than the images (8), and padding "),
        (["data.options={size: 3}"], "data.options.size: 3 is "),
        (["data={source: made, image_size: 16}"], "data.image_size: 16 is smaller than the im"),
        (
            ["data={source: made, options: {classes: 1}}"],
            "data.options.classes: 1 must be at least 2",
        ),
        (["data.limits={train: 1}"], "data.limits.train: 1 is below the number of classes (10)"),
        (["data.fit=crop", "data.image_size=null"], "data.fit: crop needs data.image_size"),
        (
            ["data.synthetic={path: a.npz, ratio: 0.001}"],
            "data.synthetic.ratio: 0.001 of a batch of 128 is less than one image; raise it",
        ),
        (
            ["data.synthetic={path: a.npz}", "train.augment.copies=2"],
            "train.augment.copies: 2 cannot be combined with data.synthetic; set it to 1",
        ),
        (
            ["cluster.strategy=fsdp", "train.objective={kind: pgd, eps: 0.1, awp: {}}"],
            "cluster.strategy: fsdp does not fit train.objective.awp",
        ),
        (
            ["model={architecture: resnet18, token_policy: drop}"],
            "model.token_policy: ",
        ),
    ],
)
def test_late_refusals_come_early(overrides, line):
    (found,) = refusal(*overrides)
    assert found.startswith(f"my.yaml: {line}")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed=true", "seed: true is not a whole number"),
        ("train.epochs=true", "train.epochs: true is not a whole number"),
        ("train.objective={kind: pgd, eps: true}", "train.objective.eps: True is not a number or"),
        ("model.std=[0]", "model.std: [0.0] must be above 0: images are divided by it"),
        ("model.mean=[5]", "model.mean: [5.0] is outside [0, 1]; pixels are fractions"),
        ("model.upsample=100000", "model.upsample: 100000 is outside 1 to 4096 pixels"),
        ("data.image_size=100000", "data.image_size: 100000 is outside 1 to 4096 pixels"),
        ("attack={l: {eps: 1e99999999, attacks: [{kind: pgd}]}}", "attack.l.eps: '1e99999999' is"),
        ("attack={l: {eps: 0.1, attacks: []}}", "attack.l.attacks: [] needs 1 or more entries"),
        ("name=A b", "name: 'A b' is not a name: write small letters, digits, - and _"),
        ("train.epochs=0", "train.epochs: 0 must be at least 1"),
    ],
)
def test_values_are_refused_in_plain_words(override, line):
    told = refusal_of(loads, BASE, source="my.yaml", overrides=[override])
    assert told.startswith(f"my.yaml: {line}")


def test_a_group_reports_all_that_it_finds():
    lines = refusal(
        "train.objective={kind: columns, band: 9}",
        "model.std=[1, 1]",
        certified_by("kind: rows, band: 10, patch_sizes: [11]"),
    )
    assert [line.split(" ")[1] for line in lines] == [
        "train.objective.band:",
        "certify.p.patch_sizes:",
        "certify.p.band:",
        "model.std:",
    ]


def test_prepared_images_are_asked_again():
    unknown = ("data={source: npz, path: x.npz}", "model.options={}")
    recipe = loads(BASE, source="my.yaml", overrides=unknown)
    check(recipe)
    check(recipe, Facts(height=32, width=32, channels=1, num_classes=2))
    (line,) = refusal(*unknown, facts=Facts(height=8, width=16, channels=1, num_classes=2))
    assert line == "my.yaml: data.image_size: 8x16 is not square; set data.image_size"
    (line,) = refusal(*unknown, facts=Facts(splits={"train": 5, "val": 0, "test": 1}))
    assert line == "my.yaml: data: the val split is empty: nothing to train on"


def test_a_given_model_is_asked_what_it_was_trained_for(tmp_path):
    spec = {"channels": 3, "image_size": 8, "num_classes": 10, "token_policy": "drop"}
    spec["trained_for"] = {"kind": "columns", "band": 2}
    (tmp_path / "model.json").write_text(json.dumps({"spec": spec}))
    text = f"name: x\ndata: {{source: digits, channels: 3}}\nmodel: {{pretrained: {tmp_path}}}\n"
    columns = certified_by("kind: columns, patch_sizes: [1]")
    check(loads(text, source="my.yaml", overrides=[columns]))
    (line,) = refusal(certified_by("kind: rows, patch_sizes: [1]"), text=text)
    assert line == "my.yaml: certify.p.band: is needed: model main was not trained on rows"
    masked = certified_by("kind: columns, patch_sizes: [1], token_policy: mask")
    (line,) = refusal(masked, text=text)
    assert line.startswith(
        "my.yaml: certify.p.token_policy: mask is not the training policy of model main"
    )
    (line,) = refusal(columns, "data.channels=1", text=text)
    assert line.startswith("my.yaml: data.channels: 1 channels in the data, but ")


def test_problems_of_trials_are_named_by_their_place():
    space = "{train.batch_size: [8, 9], model.mean: [[0.5], [0.5, 0.5]]}"
    tune = f"tune={{metric: val_accuracy, space: {space}}}"
    lines = refusal(tune, "cluster.train_workers=2")
    assert lines == [
        "my.yaml: tune.space.model.mean: [0.5, 0.5] needs 1 entries, one per channel",
        "my.yaml: tune.space.train.batch_size: 9 is not divisible by cluster.train_workers 2",
    ]


def test_the_source_is_kept_and_is_not_part_of_the_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(BASE)
    recipe = load(str(path))
    assert recipe.source == str(path)
    again = loads(BASE, source="other")
    assert recipe == again
    assert recipe.digest() == again.digest()
    assert "source" not in recipe.resolved()
    assert pickle.loads(pickle.dumps(recipe)).source == str(path)


def test_refusals_survive_the_way_between_processes():
    with pytest.raises(RecipeError) as caught:
        loads(BASE, source="my.yaml", overrides=["seed=-1", "train.epochs=0"])
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert [p.field for p in again.problems] == ["seed", "train.epochs"]


def _bomb() -> str:
    """Nine levels of nine aliases: 340 bytes that stand for 9^10 values."""
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    for below, name in zip("abcdefghi", "bcdefghij", strict=True):
        lines.append(f"{name}: &{name} [{','.join([f'*{below}'] * 9)}]")
    return "\n".join(lines)


def tuned(*axes: str) -> str:
    return f"{BASE}tune: {{metric: val_accuracy, space: {{{', '.join(axes)}}}}}"


AXIS = "train.{}: [{}]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (_bomb(), "holds more than 50,000 values"),
        ("a: &a [*a]", "holds an alias to a section that contains it"),
        ("[" * 5000 + "]" * 5000, "is nested deeper than 50 levels"),
        ("x: '" + "a" * 50_000_000 + "'", "has 50,000,005 characters; at most 1,000,000"),
        ("x: [" + "1," * 60_000 + "]", "holds more than 50,000 values"),
        (tuned(AXIS.format("epochs", ",".join(map(str, range(1, 5001))))), "5000 values"),
        (
            tuned(
                *(
                    AXIS.format(key, ",".join(map(str, range(1, 999))))
                    for key in ("epochs", "batch_size", "weight_decay", "learning_rate")
                )
            ),
            "makes more than 10000 trials",
        ),
        (
            BASE + "tune: {space: {train.epochs: {kind: integers, low: 1, high: 9}}, "
            "search: {kind: random, num_trials: 1000000000}}",
            "must be at most 10000",
        ),
    ],
)
def test_reading_is_bounded(text, said):
    start = time.process_time()
    told = refusal_of(loads, text, source="my.yaml")
    assert time.process_time() - start < 20  # unbounded, it takes minutes; a busy machine is slow
    assert said in told
    assert len(told) < 600


def test_a_large_file_is_not_even_read(tmp_path):
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(50_000_000)
    with pytest.raises(CasemateError, match=r"has 50,000,000 bytes; at most 1,000,000"):
        load(str(path))


def test_aliases_are_allowed_where_they_are_few():
    text = BASE + "attack:\n  a: &a {eps: 0.1, attacks: [{kind: pgd}]}\n  b: *a\n"
    recipe = loads(text, source="my.yaml")
    assert recipe.attack["a"] == recipe.attack["b"]


WRONG = [
    *(None, True, -1, 0, 3, 1e9, 0.5, "", "x", "8/0", "nan", float("inf"), [], [None], [1, 1]),
    *({}, {"kind": "x"}, {"x": 1}, {1: 2}, [[]], [{}], "diffusers:nowhere", "2024-01-01"),
]
INTERNAL = re.compile(
    r"Traceback|pydantic|Settings\b|Section\b|<class|dataclass|union|discriminator|\bRecipe\("
)


def _places(values, path=()):
    """Every place in nested values, by its path."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*path, key))


def _mutated(values, rng, where=re.compile("")):
    """The values with one or two of their places changed, taken away, or joined by a new key.

    `where` is found in the path of each place.
    """
    for _ in range(rng.choice([1, 1, 2])):
        places = [path for path in _places(values) if where.search(".".join(map(str, path)))]
        *above, key = rng.choice(places)
        place = values
        for part in above:
            place = place[part]
        match rng.choice(["replace", "replace", "replace", "drop", "add"]):
            case "replace":
                place[key] = rng.choice(WRONG)
            case "drop" if isinstance(place, dict):
                del place[key]
            case _ if isinstance(place, dict):
                place[f"{key}s"] = place[key]
    return values


MUTATED = ("demo", "svit-mnist5k-mini", "dds-mnist5k-mini", "in100-arch", "aas-period")


@pytest.mark.parametrize("name", MUTATED)
def test_every_refusal_is_a_line_with_file_key_and_remedy(name):
    """25 seeded mutations of each recipe: refused in the usual form, or accepted."""
    rng = random.Random(name)
    text = yaml.safe_dump(load(name).resolved())
    refused = 0
    for _ in range(25):
        values = _mutated(yaml.safe_load(text), rng)
        try:
            check(parse(values, source="my.yaml"))
        except CasemateError as error:
            refused += 1
            for line in str(error).splitlines():
                assert re.match(r"my\.yaml: [\w.$-]+: \S", line), line
                assert not INTERNAL.search(line), line
                assert len(line) < 1500, line
    assert refused > 6


def test_ready_recipes_are_checked_without_torch():
    """Of their networks, weights and schedules all is certain (`components.models.known`)."""
    code = """
import sys
from pipelines.recipe.lint import warnings_of
from pipelines.recipe.load import available, load
for name in available():
    warnings_of(load(name))
    assert "torch" not in sys.modules, name
"""
    subprocess.run([sys.executable, "-c", code], check=True)


CERTAIN = (
    "demo",
    pytest.param("dds-mnist5k-mini", marks=pytest.mark.cluster),  # three seconds
    "aas-period",
)


@pytest.mark.parametrize("name", CERTAIN)
def test_what_is_certain_without_torch_changes_no_verdict(name, monkeypatch):
    """Mutations of networks, noise and weights: the same refusals as from networks that are built.

    The other way round needs no test: where nothing is certain, the network is built.
    """
    rng = random.Random(name)
    values = load(name).resolved()
    values.pop("tune")
    text = yaml.safe_dump(values)
    recipes = []
    while len(recipes) < 12:
        try:
            recipes.append(parse(_mutated(yaml.safe_load(text), rng, WHERE), source="my.yaml"))
        except CasemateError:
            continue
    fast = [_verdict(recipe) for recipe in recipes]
    monkeypatch.setattr(check_networks, "_known", lambda *_: None)
    monkeypatch.setattr(check_networks, "_certainly_suits", lambda *_: False)
    monkeypatch.setattr(check_networks, "_certainly_starts", lambda *_: False)
    monkeypatch.setattr(gate, "PLAIN_RAND_AUGMENT", re.compile("never"))
    assert [_verdict(recipe) for recipe in recipes] == fast


WHERE = re.compile(r"data|model|objective|variants|sigma|denoiser|augment")


def _verdict(recipe):
    try:
        check(recipe)
    except RecipeError as error:
        return str(error)
    return "accepted"
