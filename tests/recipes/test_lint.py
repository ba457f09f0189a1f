"""Warnings: each known mistake is found at its key, and only there."""

import pytest

from pipelines.recipe import gpus
from pipelines.recipe.lint import warnings_of
from pipelines.recipe.load import loads

GOOD = """
name: good
data: {source: digits, image_size: 8}
model: {token_policy: drop}
train:
  epochs: 8
  objective: {kind: fgsm, eps: 0.1, eps_warmup_epochs: 2}
  variants:
    columns: {objective: {kind: columns, band: 2}}
    noisy: {objective: {kind: gaussian, sigma: 0.25}}
tune: {space: {train.objective.eps_warmup_epochs: [0, 1]}, scheduler: {kind: asha, grace_epochs: 2}}
attack: {linf: {eps: 0.1, attacks: [{kind: fgsm}, {kind: pgd}]}}
certify:
  patch: {kind: columns, model: columns, patch_sizes: [1]}
  l2: {kind: gaussian, model: noisy, sigma: 0.25, radii: [0.5]}
"""
ON_ACTORS = "attacks and evaluations and certificates"


def warned_at(override: str) -> list[str]:
    """Keys of the warnings about a good recipe with this override."""
    return [w.key for w in warnings_of(loads(GOOD, source="good", overrides=[override]))]


def test_a_good_recipe_has_no_warnings():
    assert warnings_of(loads(GOOD, source="good")) == []


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "key", "work"),
    [
        ([], 0, None, ""),
        ([], 2, "gpus_per_train_worker", "training and trials and " + ON_ACTORS),
        (["cluster.gpus_per_train_worker=1"], 1, "gpus_per_actor", ON_ACTORS),
        (["cluster.gpus_per_actor=0.5"], 1, "gpus_per_train_worker", "training and trials"),
        (["cluster.gpus_per_actor=2", "cluster.gpus_per_train_worker=1"], 8, None, ""),
    ],
)
def test_gpus_that_no_stage_uses_are_told(overrides, num_gpus, key, work):
    recipe = loads(GOOD, source="good", overrides=overrides)
    found = [w for w in warnings_of(recipe, num_gpus=num_gpus) if "GPU" in w.message]
    assert [w.key for w in found] == ([f"cluster.{key}"] if key else [])
    assert all(f"; {work} will run on CPUs" in w.message for w in found)


def test_gpus_of_this_machine_are_counted_by_their_files(tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    here, there = (loads(GOOD, source="x", overrides=o) for o in ([], ["cluster.address=a:1"]))
    assert "2 GPUs are here" in warnings_of(here)[0].message
    assert warnings_of(there) == []  # not where it will run


@pytest.mark.parametrize(
    "override",
    [
        "train.objective.eps_warmup_epochs=8",
        "model.token_policy=mask",
        "train.warmup_epochs=8",
        "train.learning_rate=0.005",
        "train.objective.clean_forward=none",
        "attack.linf.attacks.1.num_steps=9",
        "attack.linf.attacks.1.step_size=0.005",
        "attack.linf.attacks=[{kind: fgsm}]",
        "attack.linf.sanity=null",
        "attack.linf.eps=0.2",
        "certify.l2.model=main",
        "certify.l2.sigma=0.3",
        "certify.patch.band=3",
        "certify.patch.stride=3",
    ],
)
def test_each_mistake_is_found_at_its_key(override):
    assert warned_at(override) == [override.partition("=")[0]]


def test_a_variant_with_a_network_of_its_own_has_its_own_token_policy():
    vit = "architecture: tiny_vit, options: {patch_size: 8}"
    override = f"train.variants.columns.model={{{vit}, token_policy: %s}}"
    masked = [
        w.key
        for w in warnings_of(
            loads(GOOD, source="x", overrides=["model.token_policy=mask", override % "mask"])
        )
    ]
    assert masked == ["train.variants.columns.model.token_policy"]
    dropped = loads(GOOD, source="x", overrides=["model.token_policy=mask", override % "drop"])
    assert warnings_of(dropped) == []


@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("train.average={kind: swa, start_epoch: 8}", ["train.average.start_epoch"] * 3),
        ("train.objective.awp={start_epoch: 8}", ["train.objective.awp.start_epoch"]),
        ("train.objective.aas={every: 8}", ["train.objective.aas.every"]),
        ("train.variants.columns.objective={kind: ablation, size: 2}", []),
        (
            "certify.patch={kind: rows, model: columns, band: 2, patch_sizes: [1]}",
            ["certify.patch.model"],
        ),
        (
            "attack.linf.attacks=[{kind: aas, inner: {kind: pgd, num_steps: 9}}]",
            ["attack.linf.attacks.0.inner.num_steps"],
        ),
        (
            "attack.linf.attacks=[{kind: autoattack, num_steps: 50}]",
            ["attack.linf.attacks.0.num_steps"],
        ),
        ("certify.l2.challenge={eps: 9}", ["certify.l2.challenge.eps"]),
        (
            "certify.patch={kind: columns, model: noisy, band: 2, patch_sizes: [1]}",
            ["certify.patch.model"],
        ),
        (
            "certify.patch={kind: columns, model: columns, patch_sizes: [1], stop_early: true}",
            ["certify.patch.stop_early"],
        ),
        ("tune.space={train.objective.eps_warmup_epochs: [0, 3]}", ["tune.scheduler.grace_epochs"]),
    ],
)
def test_other_mistakes_are_found_where_they_are(override, keys):
    assert warned_at(override) == keys


@pytest.mark.parametrize(
    ("given", "useless"),
    [
        ({"micro_batch": 8}, [8]),  # 8 columns are asked at once
        ({"micro_batch": 7}, []),
        ({"micro_batch": 7, "sweep": {"stride": [1, 2, 4]}}, [4, 2]),
        ({"kind": "both", "micro_batch": 15}, []),
        ({"kind": "blocks", "micro_batch": 64}, [64]),
        ({"micro_batch": 64, "stop_early": False}, []),
    ],
)
def test_votes_that_cannot_stop_early_are_pointed_out(given, useless):
    section = {"kind": "columns", "model": "columns", "band": 2, "patch_sizes": [1]}
    section |= {"stop_early": True}
    found = warnings_of(loads(GOOD, source="x", overrides=[f"certify={{p: {section | given}}}"]))
    said = [warning.message for warning in found if warning.key == "certify.p.stop_early"]
    assert [int(text.split(" computes all ")[1].split()[0]) for text in said] == useless


@pytest.mark.parametrize(
    ("rule", "batch", "warned"),
    [("linear", 4224, True), ("linear", 4096, False), ("sqrt", 4224, False)],
)
def test_a_rate_that_grows_with_the_batch_is_judged_at_its_peak(rule, batch, warned):
    changes = ["train.learning_rate=0.0005", f"train.rate_rule={rule}", f"train.batch_size={batch}"]
    found = warnings_of(loads(GOOD, source="good", overrides=changes))
    assert [warning.key for warning in found] == ["train.learning_rate"] * warned
