"""Every objective and setting of a recipe reaches the training that it names."""

import pytest
import torch

from components.core.errors import CasemateError
from components.train.objectives.aas import AasTraining
from components.train.objectives.ablation import AblationTraining
from components.train.objectives.adversarial import AdversarialTraining
from components.train.objectives.awp import Awp
from components.train.objectives.mart import Mart
from components.train.objectives.trades import Trades
from pipelines.recipe.load import loads, shrink
from pipelines.stages.train.session import make_session, objective_of

TEXT = """
name: toy
data: {source: digits}
model: {options: {patch_size: 4, embed_dim: 8, depth: 1, num_heads: 2}}
train: {epochs: 2, batch_size: 8, val_steps: 1, val_items: 4}
"""


def recipe_of(*overrides: str):
    return loads(TEXT, source="toy", overrides=overrides)


KINDS = {
    "standard": "{kind: standard, criterion: bce}",
    "fgsm": "{kind: fgsm, eps: 8/255}",
    "pgd": "{kind: pgd, eps: 8/255, num_steps: 2, eps_warmup_epochs: 1, eps_per: step}",
    "trades": "{kind: trades, eps: 8/255, num_steps: 1, start: normal, step_size: 2/255}",
    "mart": "{kind: mart, eps: 8/255, num_steps: 1}",
    "awp": "{kind: trades, eps: 8/255, num_steps: 1, awp: {}}",
    "aas": "{kind: pgd, eps: 8/255, num_steps: 1, aas: {every: 1}, awp: {gamma: 0.01}}",
    "columns": "{kind: columns, band: 3}",
    "ablation": "{kind: ablation, shape: block, size: 3, position: image}",
    "gaussian": "{kind: gaussian, sigma: 0.25}",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_and_leaves_an_ordinary_model(toy, kind):
    recipe = recipe_of(f"train.objective={KINDS[kind]}")
    session = make_session(recipe, "main", toy)
    before = session.model.net.head.weight.detach().clone()
    while not session.finished:
        row = session.run_epoch()
    assert not torch.equal(session.model.net.head.weight, before)
    adversarial = "eps" in KINDS[kind]
    assert (row["val_robust_accuracy"] is not None) == adversarial
    assert row["eps"] == (pytest.approx(8 / 255) if adversarial else None)
    fresh = make_session(recipe_of(), "main", toy).model  # without wrappers
    final = session.final_model()
    fresh.load_state_dict(final.state_dict())  # nothing is missing, nothing is left over
    x = toy.splits["val"].pixels()
    with torch.no_grad():
        shown = session.evaluated.eval()(x)  # scales still attached
        assert torch.allclose(final.eval()(x), shown, atol=1e-5)
        assert torch.allclose(fresh.eval()(x), shown, atol=1e-5)


def test_settings_of_an_adversarial_objective():
    text = (
        "{kind: pgd, eps: 0.1, num_steps: 4, step_size: 0.02, step_rule: proportional, "
        "start: normal, eps_warmup_epochs: 4, eps_zero_epochs: 2, eps_shape: sine, "
        "attack_target: soft, clean_forward: train_stats, clean_every: 7, "
        "awp: {gamma: 0.02, start_epoch: 3}, "
        "aas: {every: 5, mode: augment, max_batches: 2, num_steps: 3, distance: eq3_squared}}"
    )
    recipe = recipe_of(f"train.objective={text}")
    scaled = objective_of(recipe, "main")
    assert isinstance(scaled, AasTraining)
    own = scaled.settings
    assert (own.every, own.mode, own.max_batches) == (5, "augment", 2)
    assert (scaled.search.num_steps, scaled.search.distance) == (3, "eq3_squared")
    perturbed = scaled.inner
    assert isinstance(perturbed, Awp)
    assert (perturbed.settings.gamma, perturbed.settings.start_epoch) == (0.02, 3)
    plain = perturbed.inner
    assert isinstance(plain, AdversarialTraining)
    assert plain.settings == recipe.train.objective
    assert [plain.eps_at(e) for e in (0, 2, 3, 4)] == pytest.approx([0, 0, 0.05, 0.1])


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("{kind: trades, eps: 0.1, beta: 12, passes: joint}", Trades, {"beta": 12}),
        ("{kind: mart, eps: 0.1, beta: 5, passes: separate}", Mart, {"beta": 5}),
        ("{kind: ablation, shape: row, size: 4}", AblationTraining, {"shape": "row", "size": 4}),
        ("{kind: columns, band: 4}", AblationTraining, {"shape": "column", "size": 4}),
    ],
)
def test_numbers_of_other_objectives(text, kind, expected):
    found = objective_of(recipe_of(f"train.objective={text}"), "main")
    assert isinstance(found, kind)
    assert {key: getattr(found.settings, key) for key in expected} == expected


def test_settings_of_the_optimisation(toy):
    recipe = recipe_of(
        "train.optimizer={kind: sgd, momentum: 0.8, nesterov: true}",
        "train.schedule={kind: step, every: 1, gamma: 0.5}",
        "train.learning_rate=0.64",
        "train.rate_rule=linear",
        "train.warmup_epochs=0",
        "train.clip_norm=null",
        "train.average={kind: ema, decay: 0.5}",
        "train.select=best",
        "train.patience=1",
        "train.precision=bf16",
        "train.micro_batch=3",
        "train.val_attack=apgd-ce",
        "train.objective={kind: fgsm, eps: 0.1}",
        "cluster.checkpoint_steps=1",
    )
    session, saved = make_session(recipe, "main", toy), []
    assert session.leak is not None
    assert session.val_attack.kind == "apgd-ce"
    while not session.finished:
        session.run_epoch(on_checkpoint=lambda: saved.append(session.num_done))
    assert [row["lr"] for row in session.history] == pytest.approx([0.01, 0.005])
    assert saved == [1, 1]
    group = session.updater.optimizer.param_groups[0]
    assert (group["momentum"], group["nesterov"]) == (0.8, True)
    assert session.updater.clip_norm is None
    assert session.evaluated is not session.model
    assert session.selection.best_value == max(
        row["val_robust_accuracy"] for row in session.history
    )


def test_validation_by_the_training_attack_is_at_full_epsilon(toy):
    own = "{kind: trades, eps: 0.1, num_steps: 3, eps_warmup_epochs: 9, awp: {}}"
    overrides = ["train.val_attack=train", f"train.objective={own}"]
    own = make_session(recipe_of(*overrides), "main", toy).val_attack.objective
    assert (own.eps_at(0), own.settings.num_steps) == (0.1, 3)
    beside = recipe_of(*overrides, "train.variants.plain={objective: {kind: standard}}")
    assert make_session(beside, "plain", toy).val_attack is None
    row = make_session(recipe_of(*overrides), "main", toy).run_epoch()
    assert 0 <= row["val_robust_accuracy"] <= 1
    with pytest.raises(CasemateError, match="does not exist: standard has no training attack"):
        recipe_of("train.val_attack=train", "train.val_eps=0.1")


def test_smoke_shrinks_long_trainings_to_valid_ones():
    long = recipe_of(
        "train.epochs=110",
        "train.schedule={kind: cosine, cooldown_epochs: 10}",
        "train.average={kind: swa, start_epoch: 80}",
        "train.objective={kind: pgd, eps: 0.1, eps_warmup_epochs: 10, eps_zero_epochs: 5, "
        "awp: {start_epoch: 10}, aas: {}}",
    )
    short = shrink(long).train
    assert (short.epochs, short.schedule.cooldown_epochs) == (2, 1)
    assert (short.objective.eps_warmup_epochs, short.objective.eps_zero_epochs) == (1, 0)
    assert (short.average.start_epoch, short.objective.awp.start_epoch) == (0, 0)
    assert (short.objective.aas.every, short.objective.aas.max_batches) == (1, 2)
