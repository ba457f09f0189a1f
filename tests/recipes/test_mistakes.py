"""Mistakes in recipes: one line each, with file, key path, value and what to do."""

import re
from pathlib import Path

import pytest
import yaml

from components.core.errors import CasemateError
from pipelines.recipe.load import load, loads, with_values
from tests.refusals import refusal_of

BASE = """\
name: x
data: {source: digits}
train: {variants: {noisy: {objective: {kind: gaussian, sigma: 0.25}}}}
"""
MISTAKES = yaml.safe_load((Path(__file__).parent / "mistakes.yaml").read_text(encoding="utf-8"))


def mistake(text: str, **options) -> str:
    with pytest.raises(CasemateError) as caught:
        loads(text, source="my.yaml", **options)
    return str(caught.value)


@pytest.mark.parametrize("entry", MISTAKES, ids=lambda entry: str(entry["set"]))
def test_a_mistake_is_one_line_with_file_key_and_value(entry):
    overrides = entry["set"] if isinstance(entry["set"], list) else [entry["set"]]
    line = refusal_of(loads, BASE + "seed: 1\n", source="my.yaml", overrides=overrides)
    assert re.fullmatch(".*".join(map(re.escape, entry["says"].split("…"))), line)


def test_the_smallest_number_of_draws_that_can_certify_is_allowed():
    """alpha^(1/n) > 1/2 first holds at n = 10 for alpha = 0.001: 2^-10 < 0.001 < 2^-9."""
    section = "certify={l2: {kind: gaussian, sigma: 0.25, num_estimate: 10, radii: [0.0005]}}"
    assert loads(BASE, source="x", overrides=[section]).certify["l2"].num_estimate == 10


@pytest.mark.parametrize(("sigma", "radii"), [(0.12, (0.25,)), (0.25, (0.25, 0.5, 0.75))])
def test_radii_not_written_are_those_within_reach(sigma, radii):
    section = f"certify={{l2: {{kind: gaussian, sigma: {sigma}}}}}"
    assert loads(BASE, source="x", overrides=[section]).certify["l2"].radii == radii


def test_fractions_are_pixels():
    recipe = loads(BASE, source="x", overrides=["train.objective={kind: fgsm, eps: 8/255}"])
    assert recipe.train.objective.eps == 8 / 255


def test_two_mistakes_are_two_lines():
    message = mistake("name: x\nseed: -1\ntrain: {epochs: 0}\n")
    assert message.splitlines() == [
        "my.yaml: seed: -1 must be at least 0",
        "my.yaml: data: is missing; write it",
        "my.yaml: train.epochs: 0 must be at least 1",
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
    assert mistake(BASE + "on: 3\n").startswith("my.yaml: True: is not a word; put ")
    assert mistake(BASE + "1: 2\n").startswith("my.yaml: 1: is not a word; put ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dmo", "recipe: dmo is unknown; did you mean 'demo'? `casemate recipes` lists all"),
        (
            "in1k-eps4",
            "recipe: in1k-eps4 is unknown; did you mean 'in1k-eps4-s12' or 'in1k-eps4-m12' or "
            "'in1k-eps4-l12'? `casemate recipes` lists all",
        ),
        ("zzzz", "recipe: zzzz is unknown; `casemate recipes` lists all"),
        ("nowhere.yaml", "recipe: nowhere.yaml is not a file; check the path"),
        ("no/where", "recipe: no/where is not a file; check the path"),
    ],
)
def test_unknown_recipes_are_named(name, message):
    assert refusal_of(load, name).startswith(message)


LISTED = BASE + "attack: {linf: {eps: 0.1, attacks: [{kind: fgsm}, {kind: pgd}]}}\n"


def test_a_number_in_a_key_points_into_a_list():
    key = "attack.linf.attacks.1.num_steps"
    recipe = loads(LISTED, source="x", overrides=[f"{key}=7"])
    assert [entry.num_steps for entry in recipe.attack["linf"].attacks] == [1, 7]
    assert with_values(recipe, {key: 9}).attack["linf"].attacks[1].num_steps == 9
    message = mistake(LISTED, overrides=["attack.linf.attacks.2.num_steps=7"])
    assert message.endswith("7 cannot be set: there are 2 entries, numbered from 0")
    message = mistake(LISTED, overrides=["attack.linf.attacks.pgd=7"])
    assert message.endswith("7 cannot be set: `attacks` is not a section")


def test_repeated_keys_inside_lists_are_found():
    text = BASE + "attack:\n  a:\n    eps: 0.1\n    attacks:\n    - kind: pgd\n      kind: fgsm\n"
    assert mistake(text) == "my.yaml: attack.a.attacks.0.kind: on line 9 is written twice; keep one"


def test_without_training_a_given_model_can_be_attacked_and_certified():
    text = "name: x\ndata: {source: digits}\nmodel: {pretrained: some/model}\n"
    attack = "attack={linf: {eps: 0.1, attacks: [{kind: pgd}]}}"
    assert loads(text, source="x", overrides=[attack]).model_names() == ["main"]
    certify = "certify={l2: {kind: gaussian, sigma: 0.25}}"
    assert loads(text, source="x", overrides=[certify]).model_names() == ["main"]
    untrained = mistake(text, overrides=[attack, "model.pretrained=timm"])
    assert "attack.linf.models: main is unknown" in untrained


def test_a_file_is_loaded_by_its_path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(BASE, encoding="utf-8")
    assert load(str(path)).name == "x"
    path.write_text(BASE + "sed: 1\n", encoding="utf-8")
    told = refusal_of(load, str(path))
    assert told.startswith(f"{path}: sed: 1 is unknown; did you mean 'seed'?")
