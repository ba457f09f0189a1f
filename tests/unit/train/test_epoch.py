"""Epochs: every worker's share of the same global batches, in an order that needs no state."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.train.epoch import (
    EpochSettings,
    Worker,
    batch_indices,
    make_batch,
    make_optimizer,
    num_batches,
    train_epoch,
)
from components.train.objectives.standard import Standard
from components.train.session import initial_model


def indices(num_items: int, *, batch_size: int, rank: int = 0, world: int = 1, epoch: int = 0):
    return [
        index.tolist()
        for index in batch_indices(
            num_items, batch_size=batch_size, seed=3, epoch=epoch, worker=Worker(rank, world)
        )
    ]


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 4), st.integers(0, 3))
def test_workers_partition_the_batches_of_one_worker(num_items, share, world, epoch):
    batch_size = share * world
    whole = indices(num_items, batch_size=batch_size, epoch=epoch)
    seen = [item for batch in whole for item in batch]
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(range(num_items))
    if num_items < world:
        return  # refused, see below
    parts = [
        indices(num_items, batch_size=batch_size, rank=rank, world=world, epoch=epoch)
        for rank in range(world)
    ]
    assert {len(part) for part in parts} == {num_batches(num_items, batch_size)}
    for step, batch in enumerate(whole):
        together = [item for part in parts for item in part[step]]
        assert len({len(part[step]) for part in parts}) == 1  # equal shares: a plain mean is right
        if num_items >= batch_size or num_items % world == 0:
            assert together == batch
        else:  # a small set that cannot be shared evenly loses its remainder, nothing else
            assert together == batch[: num_items - num_items % world]


def test_order_changes_with_the_epoch_only():
    assert indices(20, batch_size=5) == indices(20, batch_size=5)
    assert indices(20, batch_size=5) != indices(20, batch_size=5, epoch=1)
    assert sorted(i for batch in indices(20, batch_size=5) for i in batch) == list(range(20))


def test_a_set_smaller_than_a_batch_is_one_batch():
    assert [len(batch) for batch in indices(3, batch_size=64)] == [3]
    assert [len(batch) for batch in indices(130, batch_size=64)] == [64, 64]


def test_a_batch_that_cannot_be_shared_is_refused():
    with pytest.raises(ValueError, match="cannot be shared by 4 workers"):
        indices(3, batch_size=64, world=4)


def test_mean_gradient_of_two_workers_is_the_gradient_of_one(toy_spec, train_split):
    settings = EpochSettings(3, 1, 8, 1e-3, 0, 1.0)

    def gradient(rank: int, world: int) -> torch.Tensor:
        model = initial_model(toy_spec, seed=0).double()
        shares = batch_indices(22, batch_size=8, seed=3, epoch=0, worker=Worker(rank, world))
        batch = make_batch(
            train_split,
            next(shares),
            settings=settings,
            epoch=0,
            step=0,
            device=torch.device("cpu"),
        )
        logits = model(batch.images.double())
        torch.nn.functional.cross_entropy(logits, batch.labels).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    mean = (gradient(0, 2) + gradient(1, 2)) / 2
    assert (mean - gradient(0, 1)).abs().max() < 1e-12


def test_augmentation_follows_the_item(toy_spec, train_split):
    settings = EpochSettings(3, 1, 8, 1e-3, 0, 1.0, pad_crop=2, flip=True)

    def pixels(index: list[int], epoch: int = 0) -> torch.Tensor:
        device = torch.device("cpu")
        chosen = torch.tensor(index)
        batch = make_batch(
            train_split, chosen, settings=settings, epoch=epoch, step=0, device=device
        )
        assert batch.item_ids == tuple(f"train-{i}" for i in index)
        return batch.images

    assert torch.equal(pixels([4, 9, 2])[1], pixels([9])[0])
    assert not torch.equal(pixels([9]), pixels([9], epoch=1))


def test_biases_norms_and_position_do_not_decay(toy_spec):
    model = initial_model(toy_spec, seed=0)
    optimizer = make_optimizer(model, learning_rate=1e-3, weight_decay=0.3)
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
    optimizer = make_optimizer(model, learning_rate=1e-3, weight_decay=0)
    with pytest.raises(FloatingPointError, match="epoch 0"):
        train_epoch(
            model,
            model,
            train_split,
            Standard(),
            optimizer,
            settings=EpochSettings(3, 1, 8, 1e-3, 0, 1.0),
            epoch=0,
            worker=Worker(),
        )


def test_sums_and_learning_rate_of_an_epoch(toy_spec, train_split):
    model = initial_model(toy_spec, seed=0)
    optimizer = make_optimizer(model, learning_rate=9.0, weight_decay=0)
    steps = []
    part = train_epoch(
        model,
        model,
        train_split,
        Standard(),
        optimizer,
        settings=EpochSettings(3, 5, 8, 1e-3, 2, 1.0),
        epoch=0,
        worker=Worker(),
        on_step=lambda step, total: steps.append((step, total)),
    )
    assert steps == [(1, 2), (2, 2)]  # 22 items make two whole batches of 8
    assert part["count"] == 16
    assert 0 <= part["correct"] <= 16
    assert part["lr"] == pytest.approx(1e-3 * 2 / 4)  # second of four warm-up steps
    assert {group["lr"] for group in optimizer.param_groups} == {part["lr"]}
