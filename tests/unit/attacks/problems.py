"""Problems that several tests of attacks share: random classifiers, and trained ones."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from components.attacks.gradient import START_OFFSET, sign_ascent
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.core.types import LogitsFn


def random_problem(
    seed: int,
    network_of: Callable[[Tensor], LogitsFn],
    *,
    shape: tuple[int, ...],
    num_items: int = 6,
    num_classes: int,
    low: float = 0.0,
    high: float = 1.0,
) -> tuple[LogitsFn, Tensor, Tensor]:
    """(network, images, labels): the first row is wrong from the beginning, all others right."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_classes, *shape, generator=generator)
    x = low + (high - low) * torch.rand(num_items, *shape, generator=generator)
    logits_of = network_of(weight - weight.mean(dim=(1, 2, 3), keepdim=True))
    y = logits_of(x).argmax(dim=1)
    y[0] = (y[0] + 1) % num_classes
    return logits_of, x, y


def trained_digits(
    make: Callable[[], nn.Module],
    *,
    num_items: int,
    num_epochs: int,
    rate: float,
    eps: float,
    step_size: float,
) -> tuple[nn.Module, Items]:
    """A network after FGSM training on digits of 8 x 8 pixels, and items that it has not seen."""
    data, generator = load_digits(), torch.Generator().manual_seed(0)
    order = torch.randperm(len(data.target), generator=generator)
    x = torch.tensor(data.images / 16, dtype=torch.float32)[order, None]
    y = torch.tensor(data.target, dtype=torch.int64)[order]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    budget = {"eps": eps, "step_size": step_size, "num_steps": 1}
    for _ in range(num_epochs):
        seen = num_items + torch.randperm(len(x) - num_items, generator=generator)
        for rows in seen.split(100):
            starts = 2 * torch.rand(x[rows].shape, generator=generator) - 1
            with attack_mode(model):
                start = x[rows] + eps * starts + START_OFFSET
                x_adv = sign_ascent(model, x[rows], y[rows], start=start, **budget)
            optimizer.zero_grad()
            F.cross_entropy(model(x_adv), y[rows]).backward()
            optimizer.step()
    ids = tuple(f"digit-{i}" for i in range(num_items))
    return model, Items(x[:num_items], y[:num_items], ids, run_seed=0)
