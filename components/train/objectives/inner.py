"""Inner maximisation of adversarial training: the last iterate of a few projected sign steps.

Madry et al. 2018, eq. 2.1 and sec. 2.1. Unlike an evaluation attack, it never stops early and
has no best point: the training images of Wong et al. 2020 and Debenedetti et al. 2023 are last
iterates. Attacks run on the bare model in eval mode with frozen weights, by its fast forward pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from components.attacks.gradient import START_OFFSET, sign_ascent
from components.attacks.gradients import Faults, attack_mode
from components.attacks.losses import LossFn
from components.attacks.starts import normal_starts, random_starts
from components.core.types import Images
from components.models.fast import fast_forward
from components.models.pixels import PixelModel
from components.train.objectives.aas import AasTraining
from components.train.objectives.awp import Awp
from components.train.objectives.base import Batch, LossOut, Objective
from components.train.objectives.base_settings import AdversarialSettings

START_NOISE = 0.001  # standard deviation of the start of TRADES and MART as published
STREAMS = {"uniform": "fgsm", "normal": "normal"}  # renaming one changes every training
CHECK_EVERY = 50  # attacks on a GPU after which the host looks for faults


@contextmanager
def under_attack(bare: nn.Module) -> Iterator[nn.Module]:
    """The state of a model while images are crafted; afterwards it is as it was."""
    net = bare.net if isinstance(bare, PixelModel) else bare
    with attack_mode(bare), fast_forward(net):
        yield bare


def start_noise(
    settings: AdversarialSettings,
    item_ids: Sequence[str],
    shape: Sequence[int],
    *,
    run_seed: int,
    epoch: int,
) -> Tensor:
    """(B, *shape) random numbers of the starts of one batch, on the CPU: uniform on [-1, 1] or
    standard normal. A pure function, for threads that build batches ahead (`Batch.start_noise`).
    """
    draw = normal_starts if settings.start == "normal" else random_starts
    stream = f"{STREAMS[settings.start]}-{epoch}"
    return draw(item_ids, shape, run_seed=run_seed, stream=stream)


class InnerAttack:
    """The training attack, in the l-inf ball.

    While epsilon warms up a `fixed` step keeps the length that fits the final epsilon, as published
    (the projection keeps it legal), and a `proportional` one shrinks with epsilon. Starts are
    `uniform` in the ball, or `normal`: close to the image.
    """

    def __init__(self, settings: AdversarialSettings) -> None:
        self.settings = settings
        self._faults, self._num_unchecked = Faults(), 0

    def eps_of(self, batch: Batch) -> float:
        """Epsilon of one step."""
        if self.settings.eps_per == "epoch":
            return self.settings.eps_at(batch.epoch)
        if batch.num_steps is None:
            raise ValueError("epsilon per step needs the number of steps of the epoch")
        return self.settings.eps_at(batch.epoch + batch.step / batch.num_steps)

    def __call__(self, bare: nn.Module, batch: Batch, y: Tensor, loss_of: LossFn) -> Images:
        """Images that raise `loss_of(logits, y)`, one value per item; unchanged if eps = 0."""
        x, eps, own = batch.images, self.eps_of(batch), self.settings
        if eps == 0:  # the first epoch of a warm-up is clean: skip the attack
            return x
        base = 1.5 * own.eps / own.num_steps if own.step_size is None else own.step_size
        step_size = base if own.step_rule == "fixed" else base * eps / own.eps
        with under_attack(bare):
            x_adv = sign_ascent(
                bare,
                x,
                y,
                start=self._start(batch, eps),
                eps=eps,
                step_size=step_size,
                num_steps=own.num_steps,
                loss_of=loss_of,
                faults=self._faults,
            )
        self._check_now_and_then(x.device)
        return x_adv

    def _start(self, batch: Batch, eps: float) -> Images:
        """The start of the ascent, before projection; a function of item and epoch."""
        x, noise = batch.images, batch.start_noise
        if noise is None:
            where = {"run_seed": batch.seed, "epoch": batch.epoch}
            noise = start_noise(self.settings, batch.item_ids, x.shape[1:], **where)
        if self.settings.start == "normal":
            return x + START_NOISE * noise.to(x, non_blocking=True)
        return x + eps * noise.to(x, non_blocking=True) + START_OFFSET

    def _check_now_and_then(self, device: torch.device) -> None:
        """A GPU would wait for the host; the loss of such a step is not finite either."""
        self._num_unchecked += 1
        if device.type == "cpu" or self._num_unchecked >= CHECK_EVERY:
            self._num_unchecked = 0
            self._faults.check()


class AdversarialObjective(Objective):
    """An objective in two halves: `craft` makes images, `outer_loss` is minimised on them.

    Wrappers need the halves: weights are perturbed after the images are crafted.
    """

    settings: AdversarialSettings

    def __init__(self, settings: AdversarialSettings, *, label_smoothing: float) -> None:
        super().__init__(settings, label_smoothing=label_smoothing)
        self.attack = InnerAttack(settings)

    @classmethod
    def build(cls, settings: Any, *, label_smoothing: float, start: str | None) -> Objective:
        """The objective, wrapped in AWP and then in AAS training where these are on."""
        built: Objective = cls(settings, label_smoothing=label_smoothing)
        if settings.awp:
            built = Awp(built, settings.awp)
        return AasTraining(built, settings.aas) if settings.aas else built

    def outer_loss(
        self, wrapped: nn.Module, bare: nn.Module, batch: Batch, x_adv: Images
    ) -> LossOut:
        """The loss on the crafted images."""
        raise NotImplementedError

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        x_adv = self.craft(bare, batch) if batch.adversarial is None else batch.adversarial
        return self.outer_loss(wrapped, bare, batch, x_adv)

    @property
    def eps(self) -> float:
        return self.settings.eps

    def eps_at(self, epoch: int) -> float:
        return self.settings.eps_at(epoch)

    def start_noise(
        self, item_ids: Sequence[str], shape: Sequence[int], *, run_seed: int, epoch: int
    ) -> Tensor | None:
        where = {"run_seed": run_seed, "epoch": epoch}
        return start_noise(self.settings, item_ids, shape, **where)

    def without_warmup(self, eps: float) -> Objective:
        settings = self.settings.without_warmup(eps)
        return type(self)(settings, label_smoothing=self.label_smoothing)


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether rows of a training batch affect each other; such batches must not be joined."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def predictions(model: nn.Module, images: Images) -> Tensor:
    """(B,) classes without a graph, in the model's current mode."""
    with torch.no_grad():
        labels: Tensor = model(images).argmax(dim=1)
    return labels
