"""AAS training: scales are found on schedule, live in the model and end up in its weights."""

import copy

import pytest
import torch

from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.attacks.scales import ScaleSearch
from components.train.objectives.aas import AasTraining
from components.train.objectives.adversarial import AdversarialTraining
from components.train.objectives.awp import Awp
from components.train.objectives.base_settings import AasTrainingSettings, AwpSettings
from components.train.objectives.settings import (
    FgsmTrainingSettings,
    TradesSettings,
)
from components.train.objectives.trades import Trades
from components.train.session import initial_model

INNER = AdversarialTraining(FgsmTrainingSettings(eps=0.1), label_smoothing=0.0)


def attentive(spec, *, seed=0):
    """Fresh weights are too small for attention to matter."""
    model = initial_model(spec, seed=seed).train()
    with torch.no_grad():
        for block in model.net.blocks:
            block.attn.qkv.weight.mul_(50)
    return model


def prepared(toy_spec, *, seed=0, **settings):
    model = attentive(toy_spec, seed=seed)
    objective = AasTraining(INNER, AasTrainingSettings(**settings))
    objective.prepare(model)
    return model, objective


def scales_of(model) -> torch.Tensor:
    return model.net.attention_scales


@pytest.fixture
def three_blocks(toy_spec):
    return type(toy_spec)(
        "tiny_vit", 2, 1, 8, (0.5,), (0.5,), options={**toy_spec.options, "depth": 3}
    )


def test_fresh_scales_change_no_bit(toy_spec, new_batch):
    plain = attentive(toy_spec)
    model, objective = prepared(toy_spec)
    inner = objective.inner.loss(plain, plain, new_batch())
    assert torch.equal(objective.loss(model, model, new_batch()).loss, inner.loss)
    assert scales_of(model).tolist() == [1.0]
    assert objective.eps_at(3) == 0.1


def test_scales_are_those_of_algorithm_1(three_blocks, new_batch):
    """A first search over one mini-batch is the search of the attack with the same draw."""
    model, objective = prepared(three_blocks, every=1, batch_size=9)
    objective.begin_epoch(model, 1, [new_batch(epoch=1)])
    batch = new_batch(slice(0, 9))
    plain = attentive(three_blocks)
    with attack_mode(plain):
        items = Items(batch.images, batch.labels, batch.item_ids, batch.seed)
        found = ScaleSearch(num_draws=2)(plain, plain.net, items)
    torch.testing.assert_close(scales_of(model), torch.tensor(found[1]), rtol=1e-6, atol=1e-7)
    assert scales_of(model).tolist() != [1.0] * 3


def test_scales_go_on_from_where_they_were(three_blocks, new_batch):
    """Two batches in one epoch are one batch after the other."""
    model, objective = prepared(three_blocks, every=1)
    objective.begin_epoch(model, 1, [new_batch(epoch=1, step=0), new_batch(epoch=1, step=1)])
    other, stepwise = prepared(three_blocks, every=1)
    stepwise.begin_epoch(other, 1, [new_batch(epoch=1, step=0)])
    middle = scales_of(other).clone()
    stepwise.begin_epoch(other, 1, [new_batch(epoch=1, step=1)])
    assert torch.equal(scales_of(model), scales_of(other))
    assert not torch.equal(middle, scales_of(other))


def test_searches_come_every_few_epochs_and_see_few_batches(toy_spec, new_batch):
    model, objective = prepared(toy_spec, every=2, max_batches=3)
    asked = []

    def batches(epoch):
        for step in range(5):
            asked.append((epoch, step))
            yield new_batch(slice(0, 4), epoch=epoch, step=step)

    seen = []
    for epoch in range(5):
        objective.begin_epoch(model, epoch, batches(epoch))
        seen.append(scales_of(model).item())
    assert asked == [(epoch, step) for epoch in (2, 4) for step in range(3)]
    assert seen[0] == seen[1] == 1
    assert seen[2] == seen[3]
    assert all(module.training for module in model.modules())
    assert [objective.trains(epoch) for epoch in range(5)] == [True, True, False, True, False]
    augmenting = AasTraining(INNER, AasTrainingSettings(every=2, mode="augment"))
    assert all(augmenting.trains(epoch) for epoch in range(5))


def test_state_round_trip_and_weights_carry_the_scales(three_blocks, new_batch):
    model, objective = prepared(three_blocks, every=1)
    objective.begin_epoch(model, 1, [new_batch(epoch=1)])
    state = objective.state()
    other, resumed = prepared(three_blocks, seed=5, every=1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(scales_of(other), scales_of(model))
    scales_of(other).fill_(0.3)
    assert not torch.equal(state["attention_scales"], scales_of(other))  # a copy, not a view
    forgetful = resumed.loss(other, other, new_batch(epoch=2)).loss
    resumed.restore(state)
    losses = [
        pair[1].loss(pair[0], pair[0], new_batch(epoch=2)).loss
        for pair in ((model, objective), (other, resumed))
    ]
    assert torch.equal(*losses)
    assert not torch.equal(losses[0], forgetful)
    for pair in ((model, objective), (other, resumed)):
        pair[1].begin_epoch(pair[0], 2, [new_batch(epoch=2)])
    assert torch.equal(scales_of(model), scales_of(other))


def test_the_finished_model_is_an_ordinary_one(three_blocks, new_batch):
    model, objective = prepared(three_blocks, every=1)
    objective.begin_epoch(model, 1, [new_batch(epoch=1)])
    average = copy.deepcopy(model)
    expected = model.eval()(new_batch().images)
    plain = attentive(three_blocks)
    assert not torch.allclose(plain.eval()(new_batch().images), expected, atol=1e-4)
    for finished in (model, average):
        objective.finish(finished)
        torch.testing.assert_close(finished.eval()(new_batch().images), expected)
        plain.load_state_dict(finished.state_dict())  # the same keys as ever
        torch.testing.assert_close(plain(new_batch().images), expected)


def test_a_failed_search_keeps_the_scales(three_blocks, new_batch):
    model, objective = prepared(three_blocks, every=1)
    scales_of(model).fill_(0.5)

    def broken():
        yield new_batch()
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        objective.begin_epoch(model, 1, broken())
    assert scales_of(model).tolist() == [0.5] * 3
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_weight_perturbation_inside(toy_spec, new_batch):
    model, plain = prepared(toy_spec)
    assert plain.has_state
    trades = Trades(TradesSettings(eps=0.1, num_steps=1), label_smoothing=0.0)
    objective = AasTraining(Awp(trades, AwpSettings()), AasTrainingSettings())
    head = model.net.head.weight.detach().clone()
    with objective.perturbed(model, model, new_batch()) as batch:
        assert not torch.equal(model.net.head.weight, head)
        objective.loss(model, model, batch).loss.backward()
    assert torch.equal(model.net.head.weight, head)
    with pytest.raises(ValueError, match="prepare"):
        objective.state()
