"""Cost of patch certificates: votes by the number of tokens that they keep."""

from collections import Counter
from collections.abc import Mapping
from itertools import product

import torch
from torch import nn

from components.certify.cost import CostedModel
from components.certify.estimate import Work, patch_work
from components.certify.patch.double_masking import MaskSet
from components.certify.patch.settings import AblationSettings, DoubleMaskingSettings, PatchSettings
from components.core.errors import CasemateError
from components.data.ablation import Ablations, column_mask
from components.models.tokens import check_droppable, patch_size_of, visible_tokens

Token = tuple[int, int]  # height and width in pixels
WHOLE: Token = (1, 1)


def drops_tokens(settings: PatchSettings, model: CostedModel) -> bool:
    """Whether hidden tokens are dropped, so that a vote costs less than a whole pass."""
    policy = settings.token_policy
    policy = model.token_policy if policy == "as_trained" else policy  # type: ignore[assignment]
    if policy == "drop":
        check_droppable(model.net)
    return policy == "drop" and isinstance(getattr(model.net, "blocks", None), nn.Module)


def work_of_lengths(model: CostedModel, lengths: Mapping[int, int], *, num_items: int) -> Work:
    """The work of votes; `lengths` maps kept tokens to the number of votes that keep that many."""
    token = patch_size_of(model.net)
    return patch_work(
        num_items=num_items,
        bands_of_length=lengths,
        width=int(getattr(model.net, "embed_dim")),  # noqa: B009
        depth=len(getattr(model.net, "blocks")),  # noqa: B009
        num_classes=model.num_classes,
        token_inputs=model.channels * token[0] * token[1],
        num_prefix=int(getattr(model.net, "num_prefix_tokens", 1)),
    )


def whole_passes(model: CostedModel, num_votes: int, *, num_items: int) -> Work:
    """The work of votes that each take a whole pass."""
    return Work(num_items, num_votes, num_votes * (2.0 * model.costs.flops))  # costs count MACs


def pair_lengths(
    settings: DoubleMaskingSettings, model: CostedModel, *, token: Token
) -> Mapping[int, int]:
    """Kept tokens -> number of pairs of masks that keep that many."""
    size = (model.side, model.side)
    masks = MaskSet(image_size=size, patch=settings.mask_patch, num_masks=settings.num_masks)
    shown = model.resized(masks.visible(masks.pairs()))
    return Counter(visible_tokens(shown, token).sum(dim=1).tolist())


def ablation_lengths(
    settings: AblationSettings, model: CostedModel, *, token: Token
) -> Mapping[int, int]:
    """Kept tokens -> number of ablations that keep that many."""
    size, band = (model.side, model.side), settings.band or _trained_band(settings, model)
    ablations = Ablations(kind=settings.kind, image_size=size, band=band, stride=settings.stride)
    lengths: Counter[int] = Counter()
    for rows, columns in ablations.families:  # a vote keeps rows x columns of the token grid
        kept = (
            _kept_along(model, ablations, side, cell)
            for side, cell in zip((rows, columns), token, strict=True)
        )
        lengths.update(high * wide for high, wide in product(*kept))
    return lengths


def _kept_along(model: CostedModel, ablations: Ablations, side: int | None, cell: int) -> list[int]:
    """Tokens that each band shows along one side; all of them along one that is not divided."""
    if side is None:
        return [model.seen // cell]
    bands = [column_mask(side, start, ablations.band) for start in ablations.starts(side)]
    shown = model.resized(torch.stack(bands)[:, None, :].expand(-1, side, -1))[:, 0]
    return [int(n) for n in shown.view(len(bands), -1, cell).any(dim=2).sum(dim=1)]


def _trained_band(settings: AblationSettings, model: CostedModel) -> int:
    shape, band = model.trained_ablation or ("", 0)
    if shape != settings.kind:
        remedy = f"is needed: model {settings.model} was not trained on {settings.kind}"
        raise CasemateError(f"{model.key}.band", None, remedy)
    return band
