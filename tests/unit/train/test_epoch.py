"""The step and the epoch: augmentation by item, gradients by share, rates by progress."""

import threading
from dataclasses import replace

import pytest
import torch

from components.data.settings import AugmentSettings
from components.train.epoch import EpochPlan, epoch_batches, make_batch, train_epoch
from components.train.feed import Feeding, Share, TrainingSet, Worker
from components.train.objectives import inner
from components.train.objectives.inner import start_noise
from components.train.objectives.make import make_objective
from components.train.objectives.settings import PgdTrainingSettings, StandardSettings
from components.train.objectives.standard import Standard
from components.train.optim import make_optimizer
from components.train.session import initial_model
from components.train.settings import TrainSettings
from components.train.tally import Tally

STANDARD = Standard(StandardSettings(), label_smoothing=0.0)


def share_of(index: list[int], copies: list[int] | None = None) -> Share:
    return Share(torch.tensor(index), torch.tensor(copies or [0] * len(index)))


def plan_of(*, epochs: int = 1, **changes) -> EpochPlan:
    settings = TrainSettings(**{"batch_size": 8, "warmup_epochs": 0, **changes})
    return EpochPlan(settings, seed=3, epochs=epochs, image_size=8)


def batch_of(data: TrainingSet, share: Share, plan: EpochPlan, *, epoch: int = 0):
    cpu = torch.device("cpu")
    return make_batch(data, share, plan=plan, num_classes=2, epoch=epoch, step=0, device=cpu)


def test_mean_gradient_of_two_workers_is_the_gradient_of_one(toy_spec, train_split):
    plan = plan_of()

    def gradient(rank: int, world: int) -> torch.Tensor:
        model = initial_model(toy_spec, seed=0).double()
        data = TrainingSet(train_split)
        share = next(plan.batches(data).shares(0, Worker(rank, world)))
        batch = batch_of(data, share, plan)
        logits = model(batch.images.double())
        torch.nn.functional.cross_entropy(logits, batch.labels).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    mean = (gradient(0, 2) + gradient(1, 2)) / 2
    assert (mean - gradient(0, 1)).abs().max() < 1e-12


def test_augmentation_follows_the_item(toy_spec, train_split):
    plan = plan_of(augment=AugmentSettings(crop="pad", pad=2, flip=True))

    def pixels(index: list[int], epoch: int = 0) -> torch.Tensor:
        batch = batch_of(TrainingSet(train_split), share_of(index), plan, epoch=epoch)
        assert batch.item_ids == tuple(f"train-{i}" for i in index)
        return batch.images

    assert torch.equal(pixels([4, 9, 2])[1], pixels([9])[0])
    assert not torch.equal(pixels([9]), pixels([9], epoch=1))


def test_copies_of_an_item_differ_and_carry_their_own_names(train_split):
    plan = plan_of(augment=AugmentSettings(crop="pad", pad=2, copies=2))
    batch = batch_of(TrainingSet(train_split), share_of([9, 4, 9], [0, 0, 1]), plan)
    assert batch.item_ids == ("train-9", "train-4", "train-9#copy1")
    assert not torch.equal(batch.images[0], batch.images[2])
    assert batch.labels.tolist() == [1, 0, 1]


def test_mixing_is_the_same_for_one_worker_and_for_two(train_split):
    plan = plan_of(augment=AugmentSettings(mixup=0.8, cutmix=1.0), label_smoothing=0.1)
    data = TrainingSet(train_split)
    planned = plan.batches(data)
    whole = batch_of(data, next(planned.shares(0, Worker())), plan)
    parts = [batch_of(data, next(planned.shares(0, Worker(rank, 2))), plan) for rank in (0, 1)]
    assert torch.equal(whole.images, torch.cat([part.images for part in parts]))
    assert torch.equal(whole.targets, torch.cat([part.targets for part in parts]))
    assert torch.allclose(whole.targets.sum(dim=1), torch.ones(8))
    assert not torch.equal(whole.targets.amax(dim=1), torch.full((8,), 0.95))  # mixed for real


def test_biases_norms_and_position_do_not_decay(toy_spec):
    model = initial_model(toy_spec, seed=0)
    optimizer = make_optimizer(model, TrainSettings(weight_decay=0.3))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decay = {
        names[id(parameter)]: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert decay.keys() == {name for name, _ in model.named_parameters()}
    for name, value in decay.items():
        exempt = name.endswith(".bias") or "norm" in name
        assert value == (0 if exempt or name in ("net.cls_token", "net.pos_embed") else 0.3), name


def test_an_exploding_loss_stops_the_training(toy_spec, train_split):
    model = initial_model(toy_spec, seed=0)
    with torch.no_grad():
        model.net.head.bias.fill_(float("nan"))
    plan = plan_of()
    with pytest.raises(FloatingPointError, match="epoch 0"):
        train_epoch(
            model,
            model,
            TrainingSet(train_split),
            STANDARD,
            plan.updater(model),
            plan=plan,
            epoch=0,
            worker=Worker(),
        )


def test_sums_and_learning_rate_of_an_epoch(toy_spec, train_split):
    model = initial_model(toy_spec, seed=0)
    plan = plan_of(epochs=5, warmup_epochs=2)
    updater = plan.updater(model)
    steps, tally = [], Tally()

    def after_step(done):
        steps.append((done.num_done, done.num_steps))
        tally.merge(done.tally)

    part = train_epoch(
        model,
        model,
        TrainingSet(train_split),
        STANDARD,
        updater,
        plan=plan,
        epoch=0,
        worker=Worker(),
        after_step=after_step,
    )
    assert steps == [(1, 2), (2, 2)]  # 22 items make two whole batches of 8
    assert part["count"] == tally.count("loss") == 16
    hits = 16 * tally.means()["accuracy"]
    assert 0 <= hits <= 16
    assert hits == round(hits)
    assert part["images_per_second"] > 0
    assert part["wait_seconds"] > 0
    assert part["lr"] == pytest.approx(1e-3 * 2 / 4)  # second of four warm-up steps
    assert {group["lr"] for group in updater.optimizer.param_groups} == {part["lr"]}


def test_starts_of_the_attack_come_with_the_batch(toy_spec, train_split, monkeypatch):
    plan, data = plan_of(augment=AugmentSettings(copies=2)), TrainingSet(train_split)
    objective = make_objective(PgdTrainingSettings(eps=8 / 255), label_smoothing=0.0)
    threads = []

    def drawn(*args, **kwargs):
        threads.append(threading.current_thread().name)
        return start_noise(*args, **kwargs)

    monkeypatch.setattr(inner, "start_noise", drawn)
    model = initial_model(toy_spec, seed=0)
    batches = epoch_batches(
        data,
        model,
        plan=plan,
        epoch=1,
        worker=Worker(),
        feeding=Feeding(),
        objective=objective,
    )
    with batches as feed:
        for batch in feed:
            ahead = objective.craft(model, batch)
            in_the_step = objective.craft(model, replace(batch, start_noise=None))
            assert torch.equal(ahead, in_the_step)
            assert threads.pop() == "MainThread"  # the second one only
    assert {name[:4] for name in threads} == {"feed"}
