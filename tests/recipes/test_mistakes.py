"""Mistakes in recipes: one line each, with file, key path, value and what to do."""

import pytest

from components.core.errors import CasemateError
from pipelines.recipe import load, loads

BASE = """\
name: x
data: {source: digits}
train: {variants: {noisy: {objective: {kind: gaussian, sigma: 0.25}}}}
"""


def mistake(text: str, **options) -> str:
    with pytest.raises(CasemateError) as caught:
        loads(text, source="my.yaml", **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "start", "end"),
    [
        (
            "train.epoch=3",
            "my.yaml: train.epoch: 3 is unknown; did you mean 'epochs'? allowed: ",
            "weight_decay",
        ),
        (
            "certfy={}",
            "my.yaml: certfy: {} is unknown; did you mean 'certify'? allowed: attack, certify, ",
            "tune",
        ),
        ("train.epochs=many", "my.yaml: train.epochs: 'many' is wrong: ", "integer"),
        ("train.epochs=0", "my.yaml: train.epochs: 0 is wrong: ", "1"),
        ("data=5", "my.yaml: data: 5 is wrong: ", "DataSection"),
        ("name=A b", "my.yaml: name: 'A b' is wrong: ", "'"),
        ("seed=-1", "my.yaml: seed: -1 is wrong: ", "0"),
        ("data.source=mnist5", "my.yaml: data.source: 'mnist5' is unknown; did you ", "cifar100"),
        ("data.limits.trian=3", "my.yaml: data.limits.trian: 3 is wrong: ", "'synthetic'"),
        (
            "train.objective={kind: fgsm, eps: 8}",
            "my.yaml: train.objective.eps: 8 is outside [0, 1]; ",
            "write e.g. 8/255",
        ),
        (
            "train.objective={kind: fgsm, eps: 8/0}",
            "my.yaml: train.objective.eps: '8/0' is not a number",
            "such as 8/255",
        ),
        ("train.objective={kind: fgsm}", "my.yaml: train.objective.eps: is missing", "write it"),
        ("train.objective={kind: trades}", "my.yaml: train.objective: {'kind': 'trades'} ", "'"),
        (
            "train.variants.noisy.objective.sigma=25",
            "my.yaml: train.variants.noisy.objective.sigma: 25 is outside [0, 1]; ",
            "8/255",
        ),
        (
            "attack={linf: {kind: pgd, eps: 0.1, models: [main, nosiy]}}",
            "my.yaml: recipe: attack.linf.models: nosiy is unknown; did you mean 'noisy'? ",
            "allowed: main, noisy",
        ),
        (
            "certify={l2: {kind: gaussian, sigma: 0.25, model: man}}",
            "my.yaml: recipe: certify.l2.model: man is unknown; did you mean 'main'? ",
            "allowed: main, noisy",
        ),
        (
            "certify={l2: {kind: gaussian, sigma: 0.25, num_estimate: 9}}",
            "my.yaml: certify.l2: num_estimate: 9 draws with failure_prob 0.001 can never ",
            "raise failure_prob",
        ),
        (
            "certify={l2: {kind: gaussian, sigma: 0.25, micro_batch: 300}}",
            "my.yaml: certify.l2: block_size: 1000 is not a multiple of micro_batch 300",
            "300",
        ),
        (
            "train.variants.main={objective: {kind: standard}}",
            "my.yaml: recipe: train.variants: main is the name of ",
            "model",
        ),
        ("data={source: folder}", "my.yaml: data: data.path is missing", "place"),
        ("data.path=x", "my.yaml: data: data.path would be ignored", "remove it"),
        ("data.val_fraction=0.9", "my.yaml: data: val_fraction + test_fraction ", "train on"),
        ("{}", "--set: {} is not key=value", "--set train.epochs=2"),
        ("=3", "--set: =3 is not key=value", "--set train.epochs=2"),
        ("train.epochs=[", "--set train.epochs: [ is not a YAML value: ", "^"),
        ("seed.x=3", "--set seed.x: 3 cannot be set: ", "`seed` is not a section"),
    ],
)
def test_a_mistake_is_one_line_with_file_key_and_value(override, start, end):
    text = BASE + "seed: 1\n"
    message = mistake(text, overrides=[override])
    assert "\n" not in message
    assert message.startswith(start)
    assert message.endswith(end)


def test_the_smallest_number_of_draws_that_can_certify_is_allowed():
    """alpha^(1/n) > 1/2 first holds at n = 10 for alpha = 0.001: 2^-10 < 0.001 < 2^-9."""
    section = "certify={l2: {kind: gaussian, sigma: 0.25, num_estimate: 10}}"
    assert loads(BASE, source="x", overrides=[section]).certify["l2"].num_estimate == 10


def test_fractions_are_pixels():
    recipe = loads(BASE, source="x", overrides=["train.objective={kind: fgsm, eps: 8/255}"])
    assert recipe.train.objective.eps == 8 / 255


def test_two_mistakes_are_two_lines():
    message = mistake("name: x\nseed: -1\ntrain: {epochs: 0}\n")
    assert [line.split(" is ")[0] for line in message.splitlines()] == [
        "my.yaml: seed: -1",
        "my.yaml: data:",
        "my.yaml: train.epochs: 0",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nname: y\n", "my.yaml: name: on line 2 is written twice; keep one"),
        (
            BASE + "model:\n  options:\n    depth: 2\n    depth: 3\n",
            "my.yaml: model.options.depth: on line 7 is written twice; keep one",
        ),
        ("", "recipe: my.yaml must be a mapping with at least `name` and `data`"),
        ("- name\n", "recipe: my.yaml must be a mapping with at least `name` and `data`"),
    ],
)
def test_broken_files_are_explained(text, message):
    assert mistake(text) == message


def test_yaml_errors_name_file_and_line():
    message = mistake("name: x\ndata: {source: [digits}\n")
    assert message.startswith("recipe: my.yaml is not valid YAML: ")
    assert "line 2" in message
    assert "\n" not in message


def test_keys_that_yaml_reads_as_other_types_are_still_explained():
    assert mistake(BASE + "on: 3\n").startswith("my.yaml: True: 3 is unknown; ")
    assert mistake(BASE + "1: 2\n").startswith("my.yaml: 1: 2 is unknown; ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dmo", "recipe: dmo is unknown; did you mean 'demo'? allowed: "),
        ("nowhere.yaml", "recipe: nowhere.yaml is not a file; check the path"),
        ("no/where", "recipe: no/where is not a file; check the path"),
    ],
)
def test_unknown_recipes_are_named(name, message):
    with pytest.raises(CasemateError) as caught:
        load(name)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_file_is_loaded_by_its_path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(BASE, encoding="utf-8")
    assert load(str(path)).name == "x"
    path.write_text(BASE + "sed: 1\n", encoding="utf-8")
    with pytest.raises(CasemateError) as caught:
        load(str(path))
    assert str(caught.value).startswith(f"{path}: sed: 1 is unknown; did you mean 'seed'?")
