"""Adversarial weight perturbation: minimise the loss at the worst nearby weights.

Wu et al. 2020, "Adversarial weight perturbation helps robust generalization", eq. 7 and 8: once the
adversarial images are made, every layer moves along the gradient of the loss, by gamma times its
own norm. The gradient at the moved weights updates the original ones.

Symbols: w = a layer's weights, g = the gradient of the loss there, v = its perturbation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from components.models.pixels import PixelModel
from components.train.objectives.base import Batch, LossOut, Objective
from components.train.objectives.base_settings import AwpSettings
from components.train.objectives.wrapper import ObjectiveWrapper

TINY = 1e-20  # avoids division by a zero gradient


class Awp(ObjectiveWrapper):
    """`inner` with perturbed weights from `start_epoch` on; costs one more pass and its gradient.

    Published: gamma 0.005 around TRADES, from epoch 10; 0.01 around adversarial training.
    """

    settings: AwpSettings

    def __init__(self, inner: Objective, settings: AwpSettings) -> None:
        super().__init__(inner, settings)
        if inner.has_state:
            raise TypeError("an objective with state cannot be inside awp; wrap it around awp")

    @contextmanager
    def perturbed(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> Iterator[Batch]:
        """Inside the context the weights are w + v; afterwards they are w again, bit for bit."""
        if batch.adversarial is None:
            batch = replace(batch, adversarial=self.inner.craft(bare, batch))
        if batch.epoch < self.settings.start_epoch:
            yield batch
            return
        with frozen_statistics(bare):
            loss = self.inner.loss(bare, bare, batch).loss
        steps = weight_perturbations(bare, loss, gamma=self.settings.gamma)
        kept = [(weight, weight.detach().clone()) for weight, _ in steps]
        try:
            with torch.no_grad():
                for weight, v in steps:
                    weight.add_(v)
            yield batch
        finally:
            with torch.no_grad():
                for weight, value in kept:
                    weight.copy_(value)  # subtracting v would leave a rounding error

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        if batch.adversarial is None:
            raise ValueError("call loss inside `perturbed`, on the batch that it yields")
        return self.inner.loss(wrapped, bare, batch)

    def not_shardable(self, model: PixelModel) -> str:
        return "train.objective.awp, which moves weights that a worker must hold whole"


def weight_perturbations(
    model: nn.Module, loss: Tensor, *, gamma: float
) -> list[tuple[nn.Parameter, Tensor]]:
    """v = gamma |w| g / |g| for the weight of every layer, equal on all workers.

    Layers are parameters of two or more dimensions called `weight`: biases, norms, tokens,
    position embeddings and temperatures are not perturbed. Gradients are computed by
    `autograd.grad`, so the optimiser does not see them.
    """
    weights = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and "weight" in name and parameter.requires_grad
    ]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    steps = []
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:  # else the loss does not use this layer
            g = _mean_over_workers(gradient)
            scale = gamma * weight.detach().norm() / (g.norm() + TINY)
            steps.append((weight, scale * g))
    return steps


def _mean_over_workers(gradient: Tensor) -> Tensor:
    if not torch.distributed.is_initialized():
        return gradient
    gradient = gradient.clone()
    torch.distributed.all_reduce(gradient)
    return gradient / torch.distributed.get_world_size()


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Batch norms normalise with the batch inside the context, but keep running statistics."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    tracking = [(norm, norm.track_running_stats) for norm in norms if norm.training]
    try:
        for norm, _ in tracking:
            norm.track_running_stats = False
        yield
    finally:
        for norm, tracked in tracking:
            norm.track_running_stats = tracked
