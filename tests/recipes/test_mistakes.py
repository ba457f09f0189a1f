"""Mistakes in recipes: one line each, with file, key path, value and what to do."""

import pytest

from components.core.errors import CasemateError
from pipelines.recipe.load import load, loads, with_values
from tests.refusals import refusal_of

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
            "my.yaml: certfy: {} is unknown; did you mean 'certify'? allowed: analyze, attack, ",
            "tune",
        ),
        ("train.epochs=many", "my.yaml: train.epochs: 'many' is not ", "a whole number"),
        ("train.epochs=0", "my.yaml: train.epochs: 0 must be at least ", "1"),
        ("data=5", "my.yaml: data: 5 is not a section; ", "write e.g. {source: ...}"),
        ("name=A b", "my.yaml: name: 'A b' is not a name: ", "digit"),
        (
            "tracking.uri=htp:/server",
            "my.yaml: tracking.uri: htp:/server starts with no scheme that MLflow knows: http, ",
            "databricks",
        ),
        ("seed=-1", "my.yaml: seed: -1 must be at least ", "0"),
        ("data.source=mnist5", "my.yaml: data.source: 'mnist5' is unknown; did you ", "cifar100"),
        (
            "data.limits.trian=3",
            "my.yaml: data.limits.trian: 3 is unknown; choose one of ",
            "'synthetic'",
        ),
        (
            "train.objective={kind: fgsm, eps: 8}",
            "my.yaml: train.objective.eps: 8 is outside (0, 1]; ",
            "write e.g. 8/255",
        ),
        (
            "train.objective={kind: fgsm, eps: 8/0}",
            "my.yaml: train.objective.eps: '8/0' is not a number",
            "such as 8/255",
        ),
        ("train.objective={kind: fgsm}", "my.yaml: train.objective.eps: is missing", "write it"),
        (
            "train.objective={kind: madry}",
            "my.yaml: train.objective.kind: 'madry' is unknown; did you mean 'mart'? allowed: ",
            "trades",
        ),
        (
            "train.objective={eps: 0.1}",
            "my.yaml: train.objective.kind: is missing; choose one of standard, fgsm, ",
            "denoised",
        ),
        (
            "train.objective=trades",
            "my.yaml: train.objective: 'trades' is not a section; ",
            "write e.g. {kind: trades}",
        ),
        (
            "attack={linf: {eps: 0.1, attacks: [{num_steps: 3}]}}",
            "my.yaml: attack.linf.attacks.0.kind: is missing; choose one of fgsm, pgd, ",
            "aas",
        ),
        (
            "cluster.gpus_per_worker=1",
            "my.yaml: cluster.gpus_per_worker: 1 is split in two: write gpus_per_train_worker ",
            "gpus_per_actor (attacks and certificates, whole or a part such as 0.5)",
        ),
        (
            "cluster.gpus_per_actor=1.5",
            "my.yaml: cluster.gpus_per_actor: 1.5 is neither whole nor below 1: ",
            "write 1 or 2",
        ),
        (
            "cluster.gpus_per_train_worker=0.5",
            "my.yaml: cluster.gpus_per_train_worker: 0.5 is not a whole ",
            "number",
        ),
        ("extend=demo", "my.yaml: extend: 'demo' is unknown; did you mean 'extends'? ", "tune"),
        (
            "train.augment={crop: resized, scale: [1.0, 0.5]}",
            "my.yaml: train.augment.scale: [1.0, 0.5] is not a pair of positive numbers, ",
            "the smaller one first",
        ),
        (
            "train.val_attack=train",
            "my.yaml: train.val_attack: train does not exist: standard has no training attack; ",
            "choose pgd or apgd-ce",
        ),
        (
            "train={objective: {kind: mart, eps: 0.1}, label_smoothing: 0.1}",
            "my.yaml: train.label_smoothing: 0.1 makes soft labels, which mart cannot weigh; ",
            "leave it out",
        ),
        (
            "train={objective: {kind: denoiser, full: true}, val_eps: 0.1}",
            "my.yaml: train.val_eps: 0.1 would be ignored: a denoiser has no classes; ",
            "leave it out",
        ),
        (
            "train={objective: {kind: denoiser, full: true}, augment: {mixup: 0.8}}",
            "my.yaml: train.augment: mixes the images that a denoiser learns; ",
            "off",
        ),
        (
            "train.variants.noisy.objective.sigma=25",
            "my.yaml: train.variants.noisy.objective.sigma: 25 is outside (0, 1]; ",
            "8/255",
        ),
        (
            "attack={linf: {eps: 0.1, attacks: [{kind: pgd}], models: [main, nosiy]}}",
            "my.yaml: attack.linf.models: nosiy is unknown; did you mean 'noisy'? ",
            "allowed: main, noisy",
        ),
        (
            "attack={linf: {eps: 0.1, attacks: [{kind: pgd}], surrogate: noisi}}",
            "my.yaml: attack.linf.surrogate: noisi is unknown; did you mean 'noisy'? ",
            "allowed: main, noisy",
        ),
        (
            "attack={linf: {eps: 0.1, attacks: [{kind: pgd}], models: [main, main]}}",
            "my.yaml: attack.linf.models: ['main', 'main'] names a model ",
            "twice",
        ),
        (
            "attack={linf: {eps: 8, attacks: [{kind: pgd}]}}",
            "my.yaml: attack.linf.eps: 8 is outside [0, 1]; ",
            "write e.g. 8/255",
        ),
        (
            "attack={linf: {attacks: [{kind: pgd}]}}",
            "my.yaml: attack.linf.eps: is missing; ",
            "write it, e.g. 8/255",
        ),
        (
            "attack={linf: {eps: 0.1, attacks: [{kind: pgd}, {kind: pgd, num_step: 3}]}}",
            "my.yaml: attack.linf.attacks.1.num_step: 3 is unknown; did you mean 'num_steps'? ",
            "step_size",
        ),
        (
            "attack={linf: {eps: 0.1, attacks: [{kind: pgd}], kind: pgd}}",
            "my.yaml: attack.linf.kind: 'pgd' is unknown; ",
            "surrogate",
        ),
        (
            "attack={linf: {eps: 0.1, attacks: [{kind: spatial}]}}",
            "my.yaml: attack.linf.attacks.0.kind: spatial is not an attack of norm linf; ",
            "its own entry",
        ),
        (
            "attack={linf: {eps: 0.1, attacks: [{kind: pgd}], curves: {eps: [8]}}}",
            "my.yaml: attack.linf.curves.eps: 8 is outside [0, 1]; ",
            "8/255",
        ),
        (
            "attack={linf: {eps: 0.1, attacks: [{kind: pgd}], curves: {steps: [5, 5]}}}",
            "my.yaml: attack.linf.curves.steps: [5, 5] must ",
            "rise",
        ),
        (
            "certify={l2: {kind: gaussian, sigma: 0.25, model: man}}",
            "my.yaml: certify.l2.model: man is unknown; did you mean 'main'? ",
            "allowed: main, noisy",
        ),
        (
            "certify={l2: {kind: gaussian, sigma: 0.25, num_estimate: 9}}",
            "my.yaml: certify.l2.num_estimate: 9 draws with failure_prob 0.001 can never ",
            "raise num_estimate to 10 or failure_prob",
        ),
        (
            "certify={l2: {kind: gaussian, sigma: 0.25, num_estimate: 12, method: sequential}}",
            "my.yaml: certify.l2.num_estimate: 12 draws with failure_prob 0.001 can never ",
            "raise num_estimate to 13 or failure_prob",
        ),
        (
            "certify={l2: {kind: gaussian, sigma: 0.25, radii: [0.5, 1]}}",
            "my.yaml: certify.l2.radii: 1 is above 0.9529, the most that 100000 draws of sigma ",
            "raise num_estimate to 218105 or drop it",
        ),
        (
            "certify={l2: {kind: gaussian, sigma: 0.25, radii: [0.5, 9]}}",
            "my.yaml: certify.l2.radii: 9 is above ",
            "raise sigma or drop it",
        ),
        (
            "certify={l2: {kind: gaussian, sigma: 0.25, look_every: 32}}",
            "my.yaml: certify.l2.look_every: 32 applies to ",
            "method sequential only",
        ),
        (
            "certify={l2: {kind: gaussian, sigma: 0.25, method: randomized, failure_prob: 0.1}}",
            "my.yaml: certify.l2.failure_prob: 0.1 is too large: ",
            "method randomized needs less than 0.05",
        ),
        (
            "certify={l2: {kind: gaussian, sigma: 0.25, radii: [0, 0.5]}}",
            "my.yaml: certify.l2.radii: 0 is not a distance; ",
            "leave it out",
        ),
        (
            "certify={l2: {kind: gaussian, sigma: 0.25, micro_batch: 300}}",
            "my.yaml: certify.l2.block_size: 1000 is not a multiple of micro_batch 300",
            "300",
        ),
        (
            "train.variants.main={objective: {kind: standard}}",
            "my.yaml: train.variants: main is the name of ",
            "model",
        ),
        ("data={source: folder}", "my.yaml: data.path: is missing", "folder or file"),
        ("data.path=x", "my.yaml: data.path: x would be ignored", "remove it"),
        (
            "data.val_fraction=0.9",
            "my.yaml: data.val_fraction: 0.9 + test_fraction 0.2 ",
            "train on",
        ),
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
            "'in1k-eps4-l12' or ",
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
