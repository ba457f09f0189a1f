"""Adaptive patch attack on the column-smoothed classifier: it challenges the certificate.

Threat: any values in [0, 1] inside one square of m x m pixels, anywhere, never wrapping. The vote
has no gradient; raised instead is the mean, over the ablations that show a patch pixel, of
    max_{i != y} p_i - p_y        (p = softmax of the ablation's logits)
by sign steps on the patch pixels. Success is judged by the hard vote with ties to the lowest class,
the classifier of Levine & Feizi 2020 and Salman et al. 2022. Ablations that show no patch pixel
cannot change and keep their clean prediction. No position is skipped because a certificate calls it
safe: the attack must be able to prove a certificate wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from components.attacks.gradients import check_finite
from components.attacks.losses import margin
from components.data.ablation import column_mask, column_starts
from components.models.pixels import PixelModel
from components.models.voting import group_by_tokens

Position = tuple[int, int]  # top row, left column of the square


@dataclass(frozen=True, slots=True)
class PatchResult:
    """The strongest patched image found; no `position` when the vote was wrong without a patch."""

    x_adv: Tensor  # (C, H, W)
    position: Position | None
    prediction: int
    num_evaluations: int  # ablated images sent through the model


def hard_vote(predictions: Tensor) -> int:
    """The class with the most votes, ties to the lowest class."""
    return int(predictions.bincount().argmax())


def touched_ablations(columns: Tensor, *, left: int, patch: int) -> Tensor:
    """(K,) bool: which ablations, given as visible columns (K, W), show a pixel of the patch."""
    return columns[:, left : left + patch].any(dim=1)


def rank_positions(
    predictions: Tensor,
    *,
    height: int,
    width: int,
    band: int,
    stride: int,
    patch: int,
    num_positions: int,
) -> list[Position]:
    """Up to `num_positions` squares, those that touch the most votes for the present winner first.

    Neighbouring squares touch nearly the same votes, so those that overlap the columns of a better
    one wait until the others are used. Rows do not change who is touched: the middle goes first.
    """
    columns = _visible_columns(width, band=band, stride=stride)
    for_winner = predictions.cpu() == hard_vote(predictions)
    score = [
        int((touched_ablations(columns, left=left, patch=patch) & for_winner).sum())
        for left in range(width - patch + 1)
    ]
    ranked = sorted(range(len(score)), key=lambda left: (-score[left], left))
    apart: list[int] = []
    for left in ranked:
        if all(abs(left - other) >= patch for other in apart):
            apart.append(left)
    overlapping = [left for left in ranked if left not in apart]
    room = height - patch
    tops = list(dict.fromkeys([room // 2, room // 4, room - room // 4, 0, room]))
    squares = [(top, left) for lefts in (apart, overlapping) for top in tops for left in lefts]
    return squares[:num_positions]


def attack_columns(
    model: PixelModel,
    image: Tensor,
    label: int,
    predictions: Tensor,
    *,
    band: int,
    stride: int,
    patch: int,
    num_steps: int,
    step_size: float,
    positions: Sequence[Position],
    generator: torch.Generator,
    micro_batch: int,
) -> PatchResult:
    """Try to vote `image` (C, H, W) away from `label`; `predictions` (K,) are its clean votes.

    Black and white squares are tried everywhere first, then gradient ascent at each position from
    uniform pixels, with the step halved after 50 % and 75 % of the steps; every iterate is judged.
    It stops at the first success, else returns the patch that left `label` the smallest lead. Hold
    `attack_mode(model)` around the call.
    """
    if model.training:
        raise ValueError("votes need eval mode: hold attack_mode(model) around the attack")
    _check_positions(positions, image, patch)
    prediction = hard_vote(predictions)
    if prediction != label:
        return PatchResult(image, None, prediction, 0)
    columns = _visible_columns(image.shape[2], band=band, stride=stride)
    search = _Search(model, image, label, predictions, columns, micro_batch)
    size = (image.shape[0], patch, patch)
    for position in positions:
        for value in (0.0, 1.0):
            search.judge(image.new_full(size, value), position)
            if search.succeeded:
                return search.result()
    for position in positions:
        pixels = torch.rand(size, generator=generator, device=generator.device).to(image)
        for step in range(num_steps):
            gradient = search.gradient(pixels, position)
            if search.succeeded:
                return search.result()
            halvings = int(2 * step >= num_steps) + int(4 * step >= 3 * num_steps)
            pixels = (pixels + step_size * 0.5**halvings * gradient.sign()).clamp(0, 1)
        search.judge(pixels, position)
        if search.succeeded:
            return search.result()
    return search.result()


class _Search:
    """One image under attack: evaluates patches, counts the cost, remembers the best."""

    def __init__(
        self,
        model: PixelModel,
        image: Tensor,
        label: int,
        predictions: Tensor,
        columns: Tensor,
        micro_batch: int,
    ) -> None:
        if predictions.shape != (len(columns),):
            raise ValueError(
                f"{len(columns)} ablations need as many predictions, got {predictions}"
            )
        self.model, self.image, self.label = model, image.detach(), label
        self.clean_predictions = predictions.cpu()
        self.columns = columns
        self.masks = columns[:, None, :].expand(-1, image.shape[1], -1)
        self.groups = group_by_tokens(model, self.masks)  # rows of a call keep equally many tokens
        self.micro_batch = micro_batch
        self.num_evaluations = 0
        self.lead: int | None = None  # votes by which `label` leads in the best attempt so far
        self.best: tuple[Tensor, Position, int] | None = None

    @property
    def succeeded(self) -> bool:
        return self.best is not None and self.best[2] != self.label

    def judge(self, pixels: Tensor, position: Position) -> None:
        """Hard vote with the patch in place."""
        predictions = self.clean_predictions.clone()
        with torch.no_grad():
            for chunk in self._chunks(position, pixels.shape[-1]):
                predictions[chunk] = self._logits(pixels, position, chunk).argmax(dim=1).cpu()
        self._remember(pixels, position, predictions)

    def gradient(self, pixels: Tensor, position: Position) -> Tensor:
        """Gradient of the mean margin over touched ablations; the same pass judges the vote."""
        predictions = self.clean_predictions.clone()
        total = torch.zeros_like(pixels)
        num_touched = 0
        for chunk in self._chunks(position, pixels.shape[-1]):
            with torch.enable_grad():
                leaf = pixels.detach().clone().requires_grad_()
                logits = self._logits(leaf, position, chunk)
                labels = torch.full((len(chunk),), self.label, device=logits.device)
                (part,) = torch.autograd.grad(margin(logits.softmax(dim=1), labels).sum(), leaf)
            total += check_finite(part)
            num_touched += len(chunk)
            predictions[chunk] = logits.detach().argmax(dim=1).cpu()
        self._remember(pixels, position, predictions)
        return total / max(num_touched, 1)

    def result(self) -> PatchResult:
        assert self.best is not None  # at least one position was judged
        return PatchResult(*self.best, self.num_evaluations)

    def _chunks(self, position: Position, patch: int) -> list[Tensor]:
        touched = touched_ablations(self.columns, left=position[1], patch=patch)
        members = [group[touched[group]] for group in self.groups]
        return [
            part for group in members if len(group) for part in torch.split(group, self.micro_batch)
        ]

    def _logits(self, pixels: Tensor, position: Position, chunk: Tensor) -> Tensor:
        patched = _paste(self.image, pixels, position)
        self.num_evaluations += len(chunk)
        visible = self.masks[chunk].to(patched.device)
        return self.model.forward_ablated(patched.expand(len(chunk), -1, -1, -1), visible)

    def _remember(self, pixels: Tensor, position: Position, predictions: Tensor) -> None:
        votes = predictions.bincount(minlength=self.label + 2)
        own = int(votes[self.label])
        votes[self.label] = -1
        lead = own - int(votes.max())
        prediction = hard_vote(predictions)
        won = prediction != self.label
        if self.lead is None or won or lead < self.lead:
            self.lead = lead
            self.best = (_paste(self.image, pixels.detach(), position), position, prediction)


def _paste(image: Tensor, pixels: Tensor, position: Position) -> Tensor:
    top, left = position
    patched = image.clone()
    patched[:, top : top + pixels.shape[1], left : left + pixels.shape[2]] = pixels
    return patched


def _visible_columns(width: int, *, band: int, stride: int) -> Tensor:
    return torch.stack([column_mask(width, start, band) for start in column_starts(width, stride)])


def _check_positions(positions: Sequence[Position], image: Tensor, patch: int) -> None:
    if not positions:
        raise ValueError("the patch attack needs at least one position")
    _, height, width = image.shape
    for top, left in positions:
        if not (0 <= top <= height - patch and 0 <= left <= width - patch):
            raise ValueError(f"a {patch} x {patch} square at {(top, left)} leaves the image")
