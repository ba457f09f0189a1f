"""What the certificates of a recipe will cost; shapes alone, no data and no weights are read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.certify.estimate import (
    ACCELERATORS,
    Rate,
    Work,
    device_bytes,
    estimate,
    fits,
    l2_work,
    measured_rate,
    nominal_rate,
    patch_work,
)
from components.certify.l2.sequential import SELECT_STEP
from components.certify.l2.settings import GaussianSettings
from components.certify.patch.double_masking import MaskSet
from components.certify.patch.settings import AblationSettings, DoubleMaskingSettings, PatchSettings
from components.certify.settings import CertificateSettings
from components.core.errors import CasemateError
from components.data.ablation import Ablations, column_mask
from components.data.sources import find_source
from components.models.costs import Costs, costs_of_shapes, network_of_shapes
from components.models.settings import ModelSettings
from components.models.tokens import check_droppable, patch_size_of, visible_tokens
from pipelines.recipe import denoisers
from pipelines.recipe.schema.recipe import Recipe

NUM_CLASSES = 1000  # where the files will say; the head is a small share of all FLOPs


def estimates_of(
    recipe: Recipe,
    *,
    accelerators: Sequence[str],
    dtype: str,
    num_workers: int,
    num_items: int | None,
    passes_per_second: float | None,
) -> list[dict[str, Any]]:
    """One row per certificate that votes: passes, FLOPs, hours at each place, memory.

    Entries of a sweep that take their part of finer votes cost nothing and have no row.
    """
    if not recipe.certify:
        raise CasemateError("certify", recipe.name, "has no certificates: nothing to estimate")
    rows = []
    for name, entry in recipe.certificates().items():
        if entry.finer:
            continue
        section = entry.section
        priced = _Priced(recipe, section, key=f"certify.{name}", num_items=num_items)
        memory = priced.memory(dtype)
        rates = priced.rates(accelerators, dtype=dtype, passes_per_second=passes_per_second)
        found = {
            where: estimate(
                priced.work, rate, num_workers=num_workers, least_share=priced.least_share
            )
            for where, rate in rates.items()
        }
        any_place = next(iter(found.values()))
        rows.append(
            {
                "step": f"certify.{name}",
                "num_items": priced.work.num_items,
                "passes": any_place.passes,
                "each": "draw" if isinstance(section, GaussianSettings) else "pass",
                "flops": any_place.flops,
                "votes_bytes": any_place.votes_bytes,
                "device_bytes": memory,
                "num_workers": num_workers,
                "hours": [
                    {
                        "where": where,
                        "low": cost.hours_low,
                        "high": cost.hours_high,
                        "rate": cost.rate.source,
                        "fits": where not in ACCELERATORS or fits(memory, where),
                    }
                    for where, cost in found.items()
                ],
            }
        )
    return rows


class _AtOneLevel(nn.Module):
    """A denoising network as a function of images alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.net(images, torch.zeros(len(images), device=images.device))
        return result


class _Priced:
    """One certify section with the network behind it, as shapes."""

    def __init__(
        self, recipe: Recipe, section: CertificateSettings, *, key: str, num_items: int | None
    ) -> None:
        self.recipe, self.section, self.key = recipe, section, key
        self.model: ModelSettings = recipe.model_of(section.model)
        self.side = self._image_side()
        self.seen = self.model.upsample or self.side
        source = find_source(recipe.data.source)
        self.num_classes = source.num_classes or NUM_CLASSES
        channels = recipe.data.channels or source.channels or 3
        self.net = network_of_shapes(
            self.model.architecture,
            image_size=self.seen,
            channels=channels,
            num_classes=self.num_classes,
            options=self.model.options,
        )
        self.costs: Costs = costs_of_shapes(self.net, image_size=self.seen, channels=channels)
        self.channels = channels
        self.denoiser_costs, self.denoiser_calls = self._denoiser()
        self.work = self._work(self._num_items(num_items))

    @property
    def least_share(self) -> float:
        """Of the votes, at least: half of the ablations, or one look at the draws."""
        if isinstance(self.section, GaussianSettings) and self.section.method == "sequential":
            return min(1.0, (SELECT_STEP + self.section.look_every) / self.work.passes_per_item)
        if isinstance(self.section, AblationSettings) and self.section.stop_early:
            return -(-self.work.passes_per_item // 2) / self.work.passes_per_item
        return 1.0

    def memory(self, dtype: str) -> int:
        """Bytes of a worker at most: all weights, and the activations of its largest batch.

        Denoiser and classifier follow each other without gradients, so the larger of the two would
        nearly do; their sum also covers the images that a sampler holds between its passes. The
        challenge of an l2 certificate takes gradients through every pass of all its draws at once.
        """
        one, calls = self.denoiser_costs, self.denoiser_calls
        loads = [(self.section.micro_batch, min(calls, 1))]
        if isinstance(self.section, GaussianSettings) and self.section.challenge:
            loads.append((self.section.challenge.num_draws, calls))
        return max(
            device_bytes(
                params=self.costs.params + one.params,
                activation_bytes=self.costs.activation_bytes + kept * one.activation_bytes,
                micro_batch=batch,
                dtype=dtype,
            )
            for batch, kept in loads
        )

    def rates(
        self, accelerators: Sequence[str], *, dtype: str, passes_per_second: float | None
    ) -> dict[str, Rate]:
        if passes_per_second is not None:
            if not passes_per_second > 0:
                remedy = "is no speed; write a number above 0"
                raise CasemateError("--passes-per-second", passes_per_second, remedy)
            flops = self.work.flops_per_item / self.work.passes_per_item
            return {
                "measured": measured_rate(
                    flops_per_pass=flops, passes_per_second=passes_per_second, where="as given"
                )
            }
        width = int(getattr(self.net, "num_features", 0))
        names = accelerators or [n for n, a in ACCELERATORS.items() if dtype in a.peak_tflops]
        # An unknown dtype leaves no name: let the first accelerator say what there is.
        return {
            name: nominal_rate(name, dtype=dtype, width=width)
            for name in names or list(ACCELERATORS)[:1]
        }

    def _image_side(self) -> int:
        side = self.recipe.data.image_size or find_source(self.recipe.data.source).side
        if side is None:
            raise CasemateError("data.image_size", None, "is open; add --set data.image_size=224")
        return side

    def _num_items(self, given: int | None) -> int:
        published = find_source(self.recipe.data.source).splits or {}
        limit = self.recipe.data.limits.get("test")
        known = [n for n in (self.section.num_items, given, limit) if n]
        if not known and not published.get("test"):
            raise CasemateError(f"{self.key}.num_items", None, "is open; say --items N")
        return min(known) if known else int(published["test"])

    def _work(self, num_items: int) -> Work:
        section, plain = self.section, 2.0 * self.costs.flops  # costs count one per MAC
        if isinstance(section, GaussianSettings):
            return l2_work(
                num_items=num_items,
                num_select=section.num_select,
                num_estimate=section.num_estimate,
                classifier_flops=plain,
                denoiser_flops=2.0 * self.denoiser_costs.flops,
                denoiser_calls=self.denoiser_calls,
            )
        assert isinstance(section, AblationSettings | DoubleMaskingSettings)
        if not self._drops(section):
            passes = sum(self._lengths(section, token=(1, 1)).values())
            return Work(num_items, passes, passes * plain)
        net: Any = self.net
        token = patch_size_of(self.net)
        return patch_work(
            num_items=num_items,
            bands_of_length=self._lengths(section, token=token),
            width=int(net.embed_dim),
            depth=len(net.blocks),
            num_classes=self.num_classes,
            token_inputs=self.channels * token[0] * token[1],
            num_prefix=int(getattr(net, "num_prefix_tokens", 1)),
        )

    def _denoiser(self) -> tuple[Costs, int]:
        """What the denoiser of a certificate costs, and how often it is asked for each draw."""
        section = self.section
        if not isinstance(section, GaussianSettings) or section.denoiser is None:
            return Costs(params=0, flops=0, activation_bytes=0), 0
        found = denoisers.check_use(
            self.recipe, self.key, section, channels=self.channels, side=self.side
        )
        if found is None:
            source = denoisers.folder_behind(self.recipe, section.denoiser)
            remedy = (
                "is not on this machine: what it costs is unknown; copy its .json files to that "
                "place (no weights are needed), or estimate where the folder is"
            )
            raise CasemateError(f"{self.key}.denoiser", source, remedy)
        net = _AtOneLevel(found.network(image_size=self.side, channels=self.channels))
        costs = costs_of_shapes(net, image_size=self.side, channels=self.channels)
        return costs, denoisers.num_passes(section, found.diffusion)

    def _drops(self, section: PatchSettings) -> bool:
        policy = section.token_policy
        policy = self.model.token_policy if policy == "as_trained" else policy
        if policy == "drop":
            check_droppable(self.net)
        return policy == "drop" and isinstance(getattr(self.net, "blocks", None), nn.Module)

    def _lengths(
        self, section: AblationSettings | DoubleMaskingSettings, *, token: tuple[int, int]
    ) -> Mapping[int, int]:
        """Kept tokens -> number of votes that keep so many."""
        size = (self.side, self.side)
        if isinstance(section, DoubleMaskingSettings):
            masks = MaskSet(image_size=size, patch=section.mask_patch, num_masks=section.num_masks)
            shown = self._resized(masks.visible(masks.pairs()))
            return Counter(visible_tokens(shown, token).sum(dim=1).tolist())
        band = section.band or self._trained_band()
        ablations = Ablations(kind=section.kind, image_size=size, band=band, stride=section.stride)
        lengths: Counter[int] = Counter()
        for rows, columns in ablations.families:  # a vote keeps rows x columns of the token grid
            kept = (
                self._kept_along(ablations, side, cell)
                for side, cell in zip((rows, columns), token, strict=True)
            )
            lengths.update(high * wide for high, wide in product(*kept))
        return lengths

    def _kept_along(self, ablations: Ablations, side: int | None, cell: int) -> list[int]:
        """Tokens that each band shows along one side; all of them along one that is not divided."""
        if side is None:
            return [self.seen // cell]
        bands = [column_mask(side, start, ablations.band) for start in ablations.starts(side)]
        shown = self._resized(torch.stack(bands)[:, None, :].expand(-1, side, -1))[:, 0]
        return [int(n) for n in shown.view(len(bands), -1, cell).any(dim=2).sum(dim=1)]

    def _resized(self, visible: Tensor) -> Tensor:
        """(K, H, W) bool at the network's size, as the model's own adapter resizes them."""
        if self.model.upsample is None:
            return visible
        size, mode = (self.seen, self.seen), self.model.upsample_mode
        return F.interpolate(visible[:, None].float(), size=size, mode=mode)[:, 0] > 0

    def _trained_band(self) -> int:
        from pipelines.recipe.check import trained_ablation

        shape, band = trained_ablation(self.recipe.objective_of(self.section.model)) or ("", 0)
        if shape != self.section.kind:
            remedy = f"is needed: model {self.section.model} is not trained on {self.section.kind}"
            raise CasemateError(f"{self.key}.band", None, remedy)
        return band
