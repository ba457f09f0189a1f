"""Optimisers, clipping, precision and small passes against what they must equal."""

from functools import partial

import pytest
import torch
from torch import nn

from components.train.epoch import EpochPlan, split_batch, train_epoch
from components.train.feed import TrainingSet, Worker
from components.train.objectives import settings as s
from components.train.objectives.make import make_objective
from components.train.optim import Updater, autocast_passes, make_optimizer
from components.train.session import initial_model
from components.train.settings import SgdSettings, TrainSettings
from components.train.tally import Tally


def one_step(model, settings: TrainSettings, gradients, *, lr: float, clip=None):
    optimizer = make_optimizer(model, settings)
    updater = Updater(optimizer, model, clip_norm=clip, precision="float32")
    for gradient in gradients:
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, gradient)
        updater.step(lr)
    return updater


def test_sgd_is_momentum_by_hand(toy_spec):
    model = initial_model(toy_spec, seed=0)
    before = model.net.head.weight.detach().clone()
    settings = TrainSettings(optimizer=SgdSettings(momentum=0.9), weight_decay=0.5)
    one_step(model, settings, [0.1, 0.3], lr=0.01)
    v = 0.1 + 0.5 * before
    w = before - 0.01 * v
    v = 0.9 * v + 0.3 + 0.5 * w
    assert torch.allclose(model.net.head.weight, w - 0.01 * v, atol=1e-7)
    assert model.net.head.weight.grad is None


def test_adamw_moves_by_the_rate_and_decays_apart_from_it(toy_spec):
    model = initial_model(toy_spec, seed=0)
    weight, bias = model.net.head.weight.detach().clone(), model.net.head.bias.detach().clone()
    one_step(model, TrainSettings(weight_decay=0.5), [0.7], lr=0.01)
    assert torch.allclose(model.net.head.weight, weight * (1 - 0.01 * 0.5) - 0.01, atol=1e-6)
    assert torch.allclose(model.net.head.bias, bias - 0.01, atol=1e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("exempt", [{"cls_token", "pos_embed"}, {"blocks.0.*"}])
def test_groups_of_weights_are_those_of_timm(toy_spec, weight_decay, exempt):
    from timm.optim import param_groups_weight_decay

    model = initial_model(toy_spec, seed=0)
    model.net.no_weight_decay = lambda: exempt
    model.net.head.bias.requires_grad = False
    names = [f"net.{name}" for name in exempt]
    expected = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=names)
    optimizer = make_optimizer(model, TrainSettings(weight_decay=weight_decay))
    for group, other in zip(optimizer.param_groups, expected, strict=True):
        assert group["weight_decay"] == other["weight_decay"]
        assert list(map(id, group["params"])) == list(map(id, other["params"]))


@pytest.mark.parametrize(("clip", "expected"), [(None, 3.0), (1e9, 3.0), (0.5, None)])
def test_clipping_bounds_the_norm_of_the_whole_gradient(toy_spec, clip, expected):
    model = initial_model(toy_spec, seed=0)
    before = [w.detach().clone() for w in model.parameters()]
    settings = TrainSettings(optimizer=SgdSettings(momentum=0), weight_decay=0)
    one_step(model, settings, [3.0], lr=1.0, clip=clip)
    moved = torch.cat(
        [(b - w.detach()).flatten() for b, w in zip(before, model.parameters(), strict=True)]
    )
    if expected is None:
        assert float(moved.norm()) == pytest.approx(clip, rel=1e-4)
    else:
        assert torch.allclose(moved, torch.full_like(moved, expected), atol=1e-5)


def gradient_of(model, objective, batches, split, *, micro_batch, precision="float32"):
    """The gradient that one step of an epoch leaves, caught before it is used."""
    caught, tally = [], Tally()

    class Catching(Updater):
        def step(self, learning_rate):
            self.scaler.unscale_(self.optimizer)
            caught.append(torch.cat([w.grad.flatten() for w in self.model.parameters()]))
            self.optimizer.zero_grad()

    settings = TrainSettings(batch_size=batches, micro_batch=micro_batch, precision=precision)
    optimizer = make_optimizer(model, settings)
    train_epoch(
        model,
        model,
        TrainingSet(split),
        objective,
        Catching(optimizer, model, clip_norm=None, precision=precision),
        plan=EpochPlan(settings, seed=3, epochs=1, image_size=8),
        epoch=0,
        worker=Worker(),
        after_step=lambda done: tally.merge(done.tally),
    )
    return caught[0], tally.means()


new_objective = partial(make_objective, label_smoothing=0.0)
TRADES = new_objective(s.TradesSettings(eps=0.1, num_steps=1))
OBJECTIVES = [
    make_objective(s.StandardSettings(), label_smoothing=0.1),
    new_objective(s.FgsmTrainingSettings(eps=0.1, clean_every=1)),
    TRADES,
    new_objective(s.AblationTrainingSettings(size=3, position="image")),
    new_objective(s.GaussianTrainingSettings(sigma=0.25)),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: type(objective).__name__)
def test_small_passes_add_up_to_the_gradient_of_the_whole_batch(toy_spec, train_split, objective):
    model = initial_model(toy_spec, seed=0)
    whole, figures = gradient_of(model, objective, 20, train_split, micro_batch=None)
    parts, sums = gradient_of(model, objective, 20, train_split, micro_batch=6)  # 6, 6, 6 and 2
    assert (whole - parts).abs().max() < 1e-6
    assert whole.abs().max() > 1e-3
    assert sums == pytest.approx(figures, abs=1e-6)


def test_parts_of_a_batch_are_its_rows(new_batch):
    batch = new_batch(slice(0, 7), epoch=3, step=2)
    parts = list(split_batch(batch, 3))
    assert [len(part.images) for part in parts] == [3, 3, 1]
    assert torch.equal(torch.cat([part.images for part in parts]), batch.images)
    assert sum((part.item_ids for part in parts), ()) == batch.item_ids
    assert {(part.epoch, part.step) for part in parts} == {(3, 2)}
    assert list(split_batch(batch, 7)) == [batch]


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.01)])
def test_reduced_precision_is_close_but_not_equal(toy_spec, train_split, precision, tolerance):
    model = initial_model(toy_spec, seed=0)
    exact, _ = gradient_of(model, TRADES, 20, train_split, micro_batch=None)
    rough, _ = gradient_of(model, TRADES, 20, train_split, micro_batch=None, precision=precision)
    assert 0 < (exact - rough).norm() / exact.norm() < tolerance
    assert "forward" not in vars(model)  # the model is as it was


class Dtypes(nn.Module):
    """Notes in which precision its matrix product runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 2), []

    def forward(self, x):
        out = self.layer(x)
        self.seen.append(out.dtype)
        return out


@pytest.mark.parametrize(
    ("precision", "attacking", "inside"),
    [
        ("float32", False, torch.float32),
        ("bfloat16", False, torch.bfloat16),
        ("bfloat16", True, torch.bfloat16),
        ("float16", False, torch.float16),
        ("float16", True, torch.float32),  # never half precision for an attack
    ],
)
def test_logits_come_back_in_full_precision(precision, attacking, inside):
    model = Dtypes().train(not attacking)
    with autocast_passes(model, precision):
        assert model(torch.ones(1, 2)).dtype == torch.float32
    assert model.seen == [inside]


def test_weights_that_move_between_passes_are_not_cached():
    model = Dtypes()
    with autocast_passes(model, "bfloat16"):
        before = model(torch.ones(1, 2))
        with torch.no_grad():
            model.layer.weight.add_(1)
        assert torch.allclose(model(torch.ones(1, 2)) - before, torch.tensor(2.0), atol=0.05)


def test_a_step_that_overflows_is_left_out_and_halves_the_scale(toy_spec):
    model = initial_model(toy_spec, seed=0)
    before = model.net.head.weight.detach().clone()
    optimizer = make_optimizer(model, TrainSettings())
    updater = Updater(optimizer, model, clip_norm=1.0, precision="float16")
    scale = updater.scaler.get_scale()
    updater.backward(model.net.head.weight.sum() * float("inf"))
    updater.step(0.1)
    assert torch.equal(model.net.head.weight, before)
    assert updater.scaler.get_scale() == scale / 2
    updater.backward(model.net.head.weight.sum())
    updater.step(0.1)
    assert not torch.equal(model.net.head.weight, before)
