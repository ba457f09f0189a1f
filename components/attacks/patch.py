"""Adaptive patch attack on a classifier that votes over masked copies, to challenge certificates.

Threat: any values in [0, 1] inside one square of m x m pixels, anywhere, never wrapping. The vote
has no gradient; the attack increases the mean, over the copies that show a patch pixel, of
    max_{i != y} p_i - p_y        (p = softmax of the copy's logits)
by sign steps on the patch pixels. The deployed decision defines success: for ablations the hard
vote with ties to the lowest class (Levine & Feizi 2020, Salman et al. 2022), for pairs of masks
double masking (Xiang et al. 2022). Copies without a patch pixel cannot change and keep their clean
prediction. Positions that a certificate calls safe are not skipped: the attack must be able to
disprove a certificate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from components.attacks.gradients import check_finite
from components.attacks.losses import margin
from components.core.evaluations import EVALUATIONS
from components.models.masked_votes import Masks, group_by_tokens, spans
from components.models.pixels import PixelModel

Position = tuple[int, int]  # top row, left column of the square
Decide = Callable[[Tensor], int]  # (K,) predictions -> the class of the vote


@dataclass(frozen=True, slots=True)
class PatchResult:
    """The strongest patched image found; no `position` if the vote was wrong without a patch."""

    x_adv: Tensor  # (C, H, W)
    position: Position | None
    prediction: int
    num_evaluations: int  # ablated images sent through the model


def hard_vote(predictions: Tensor) -> int:
    """The class with the most votes, ties to the lowest class."""
    return int(predictions.bincount().argmax())


def touched_masks(masks: Masks, *, positions: Sequence[Position], patch: int) -> Tensor:
    """(P, K) bool: which of the K masks show a pixel of the square at each position."""
    touched = torch.empty(len(positions), len(masks), dtype=torch.bool)
    for span in spans(masks):
        shown = masks[span]
        for row, (top, left) in zip(touched, positions, strict=True):
            row[span] = shown[:, top : top + patch, left : left + patch].flatten(1).any(dim=1)
    return touched


def rank_positions(
    predictions: Tensor, masks: Masks, *, winner: int, patch: int, num_positions: int
) -> list[Position]:
    """Up to `num_positions` squares, those that touch the most votes for `winner` first.

    Neighbouring squares touch nearly the same votes, so squares that overlap a better one come
    after all others. Along a side that the masks do not divide (rows, for column bands) a shift
    does not change the touched votes: squares differ along the other side, the middle first.
    """
    score, divided = _score(masks, predictions.cpu() == winner, patch=patch)
    tops, lefts = (
        range(room) if divides else range(1)
        for room, divides in zip(score.shape, divided, strict=True)
    )
    ranked = sorted(
        ((top, left) for top in tops for left in lefts),
        key=lambda cell: (-int(score[cell]), cell),
    )
    apart: list[Position] = []
    for cell in ranked:
        if len(apart) < num_positions and all(_apart(cell, other, patch) for other in apart):
            apart.append(cell)
    chosen = set(apart)
    overlapping = [cell for cell in ranked if cell not in chosen]
    moves = [
        (top, left)
        for top in _free_starts(score.shape[0], divides=divided[0])
        for left in _free_starts(score.shape[1], divides=divided[1])
    ]
    squares = [
        (top + down, left + right)
        for cells in (apart, overlapping)
        for down, right in moves
        for top, left in cells
    ]
    return squares[:num_positions]


def _apart(cell: Position, other: Position, patch: int) -> bool:
    return any(abs(a - b) >= patch for a, b in zip(cell, other, strict=True))


def _free_starts(num_starts: int, *, divides: bool) -> list[int]:
    """Starts of squares along a side that no mask divides, the middle first; [0] if one does."""
    room = num_starts - 1
    if divides:
        return [0]
    return list(dict.fromkeys([room // 2, room // 4, room - room // 4, 0, room]))


def _score(masks: Masks, counted: Tensor, *, patch: int) -> tuple[Tensor, list[bool]]:
    """(P_h, P_w): how many `counted` masks show a pixel of the square at each position.

    And whether any mask divides the rows, and the columns.
    """
    height, width = masks[torch.tensor([0])].shape[1:]
    score, divided = torch.zeros(height - patch + 1, width - patch + 1), [False, False]
    for span in spans(masks):
        shown = masks[span]
        divided = [
            known or bool((shown != shown.select(axis, 0).unsqueeze(axis)).any())
            for axis, known in zip((1, 2), divided, strict=True)
        ]
        seen = F.max_pool2d(shown[counted[span], None].float(), patch, stride=1)
        score += seen.sum(dim=(0, 1))
    return score, divided


def attack_vote(
    model: PixelModel,
    image: Tensor,
    label: int,
    predictions: Tensor,
    masks: Masks,
    *,
    patch: int,
    num_steps: int,
    step_size: float,
    positions: Sequence[Position],
    generator: torch.Generator,
    micro_batch: int,
    decide: Decide = hard_vote,
) -> PatchResult:
    """A patch on `image` (C, H, W) that changes its vote `label`; `predictions` (K,) are clean.

    `masks` are the visible pixels of each vote, `decide` derives one class from the votes. Black
    and white squares are tried at all positions first, then gradient ascent at each position from
    uniform pixels, with the step halved after 50 % and 75 % of the steps; every iterate is
    evaluated. Stops at the first success, else returns the patch with the smallest lead of `label`.
    Hold `attack_mode(model)` around the call.
    """
    if model.training:
        raise ValueError("votes need eval mode: hold attack_mode(model) around the attack")
    _check_positions(positions, image, patch)
    prediction = decide(predictions)
    if prediction != label:
        return PatchResult(image, None, prediction, 0)
    if predictions.shape != (len(masks),):
        raise ValueError(f"{len(masks)} masks need as many predictions, got {predictions}")
    squares = touched_masks(masks, positions=positions, patch=patch)
    touched = dict(zip(positions, squares, strict=True))
    search = _Search(model, image, label, predictions, masks, touched, micro_batch, decide)
    size = (image.shape[0], patch, patch)
    for position in positions:
        for value in (0.0, 1.0):
            search.evaluate(image.new_full(size, value), position)
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
        search.evaluate(pixels, position)
        if search.succeeded:
            return search.result()
    return search.result()


class _Search:
    """One image under attack: evaluates patches, counts the cost, keeps the best."""

    def __init__(
        self,
        model: PixelModel,
        image: Tensor,
        label: int,
        predictions: Tensor,
        masks: Masks,
        touched: Mapping[Position, Tensor],
        micro_batch: int,
        decide: Decide,
    ) -> None:
        self.model, self.image, self.label = model, image.detach(), label
        self.clean_predictions = predictions.cpu()
        self.masks, self.touched, self.decide = masks, touched, decide
        self.groups = group_by_tokens(model, masks)  # rows of a call have equally many tokens
        self.micro_batch = micro_batch
        self.num_evaluations = 0
        self.lead: int | None = None  # votes by which `label` leads in the best attempt so far
        self.best: tuple[Tensor, Position, int] | None = None

    @property
    def succeeded(self) -> bool:
        return self.best is not None and self.best[2] != self.label

    def evaluate(self, pixels: Tensor, position: Position) -> None:
        """Record the vote with the patch in place."""
        predictions = self.clean_predictions.clone()
        with torch.no_grad():
            for chunk in self._chunks(position):
                predictions[chunk] = self._logits(pixels, position, chunk).argmax(dim=1).cpu()
        self._record(pixels, position, predictions)

    def gradient(self, pixels: Tensor, position: Position) -> Tensor:
        """Gradient of the mean margin over touched votes; the same pass records the vote."""
        predictions = self.clean_predictions.clone()
        total = torch.zeros_like(pixels)
        num_touched = 0
        for chunk in self._chunks(position):
            with torch.enable_grad():
                leaf = pixels.detach().clone().requires_grad_()
                logits = self._logits(leaf, position, chunk)
                labels = torch.full((len(chunk),), self.label, device=logits.device)
                (part,) = torch.autograd.grad(margin(logits.softmax(dim=1), labels).sum(), leaf)
            total += check_finite(part)
            num_touched += len(chunk)
            predictions[chunk] = logits.detach().argmax(dim=1).cpu()
        self._record(pixels, position, predictions)
        return total / max(num_touched, 1)

    def result(self) -> PatchResult:
        assert self.best is not None  # at least one position was evaluated
        return PatchResult(*self.best, self.num_evaluations)

    def _chunks(self, position: Position) -> list[Tensor]:
        touched = self.touched[position]
        members = [group[touched[group]] for group in self.groups]
        return [
            part for group in members if len(group) for part in torch.split(group, self.micro_batch)
        ]

    def _logits(self, pixels: Tensor, position: Position, chunk: Tensor) -> Tensor:
        patched = _paste(self.image, pixels, position)
        self.num_evaluations += len(chunk)
        EVALUATIONS.add(len(chunk))
        visible = self.masks[chunk].to(patched.device)
        return self.model.forward_ablated(patched.expand(len(chunk), -1, -1, -1), visible)

    def _record(self, pixels: Tensor, position: Position, predictions: Tensor) -> None:
        votes = predictions.bincount(minlength=self.label + 2)
        own = int(votes[self.label])
        votes[self.label] = -1
        lead = own - int(votes.max())
        prediction = self.decide(predictions)
        won = prediction != self.label
        if self.lead is None or won or lead < self.lead:
            self.lead = lead
            self.best = (_paste(self.image, pixels.detach(), position), position, prediction)


def _paste(image: Tensor, pixels: Tensor, position: Position) -> Tensor:
    top, left = position
    patched = image.clone()
    patched[:, top : top + pixels.shape[1], left : left + pixels.shape[2]] = pixels
    return patched


def _check_positions(positions: Sequence[Position], image: Tensor, patch: int) -> None:
    if not positions:
        raise ValueError("the patch attack needs at least one position")
    _, height, width = image.shape
    for top, left in positions:
        if not (0 <= top <= height - patch and 0 <= left <= width - patch):
            raise ValueError(f"a {patch} x {patch} square at {(top, left)} leaves the image")
