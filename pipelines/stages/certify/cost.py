"""Cost estimates of a recipe's certificates, from shapes alone: no data or weights are read."""

import torch
from torch import Tensor, nn

from components.certify.cost import NO_DENOISER, CostedModel
from components.certify.estimate import Estimate, device_bytes, estimate
from components.certify.family import AnyFamily
from components.certify.registry import family_of
from components.certify.settings import CertificateSettings
from components.core.errors import CasemateError
from components.models.costs import Costs, costs_of_shapes
from pipelines.recipe import denoisers
from pipelines.recipe.costs import NUM_CLASSES, CostedNetwork, Hardware, Row, hours_at, image_side
from pipelines.recipe.facts import known_channels, source_info
from pipelines.recipe.schema.recipe import Recipe


def estimates_of(recipe: Recipe, hardware: Hardware, *, num_items: int | None) -> list[Row]:
    """One row per certificate that votes: passes, FLOPs, hours at each place, memory.

    Entries of a sweep that take their part of finer votes cost nothing and have no row.
    """
    if not recipe.certify:
        raise CasemateError(
            "certify", recipe.name, "has neither certificates nor suites: nothing to estimate"
        )
    rows = []
    for name, entry in recipe.certificates().items():
        if entry.finer:
            continue
        settings, key = entry.section, f"certify.{name}"
        family, model = family_of(settings.kind), _model(recipe, settings, key=key)
        count = _num_items(recipe, settings, num_items, key=key)
        work = family.work(settings, model, num_items=count)
        least = family.least_share(settings, passes_per_item=work.passes_per_item)
        flops = work.flops_per_item / work.passes_per_item
        rates = hardware.rates([model.net], flops_per_pass=flops)
        found = {
            where: estimate(work, rate, num_workers=hardware.num_workers, least_share=least)
            for where, rate in rates.items()
        }
        memory = _memory(family, settings, model, hardware.dtype)
        row = {"step": key, "num_items": count, "passes": work.passes, "each": family.vote_unit}
        rows.append(row | _figures(found, memory=memory, num_workers=hardware.num_workers))
    return rows


def _figures(found: dict[str, Estimate], *, memory: int, num_workers: int) -> Row:
    any_place = next(iter(found.values()))
    return {
        "flops": any_place.flops,
        "votes_bytes": any_place.votes_bytes,
        "device_bytes": memory,
        "num_workers": num_workers,
        "hours": [hours_at(where, cost, memory=memory) for where, cost in found.items()],
    }


class _AtOneLevel(nn.Module):
    """A denoising network as a function of images alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.net(images, torch.zeros(len(images), device=images.device))
        return result


def _model(recipe: Recipe, settings: CertificateSettings, *, key: str) -> CostedModel:
    """The networks of a certificate, as shapes."""
    section, side = recipe.model_of(settings.model), image_side(recipe)
    source = source_info(recipe.data)
    channels = known_channels(recipe.data) or 3
    seen, num_classes = section.upsample or side, source.num_classes or NUM_CLASSES
    own = CostedNetwork.of(
        section.architecture,
        side=seen,
        channels=channels,
        num_classes=num_classes,
        options=section.options,
    )
    behind, calls = _denoiser(recipe, settings, key=key, channels=channels, side=side)
    return CostedModel(
        key=key,
        net=own.net,
        costs=own.costs,
        channels=channels,
        num_classes=num_classes,
        side=side,
        upsample=section.upsample,
        upsample_mode=section.upsample_mode,
        token_policy=section.token_policy,
        trained_ablation=_trained_ablation(recipe, settings.model),
        denoiser=behind,
        denoiser_calls=calls,
    )


def _trained_ablation(recipe: Recipe, model: str) -> tuple[str, int] | None:
    return recipe.objective_of(model).trained_ablation() if recipe.train else None


def _denoiser(
    recipe: Recipe, settings: CertificateSettings, *, key: str, channels: int, side: int
) -> tuple[Costs, int]:
    """Cost of a certificate's denoiser, and its passes per draw."""
    if (name := settings.denoiser_name) is None:
        return NO_DENOISER, 0
    found = denoisers.check_use(recipe, key, settings, channels=channels, side=side)
    if found is None:
        source = denoisers.folder_behind(recipe, name)
        remedy = (
            "is not on this machine: what it costs is unknown; copy its .json files to that "
            "place (no weights are needed), or estimate where the folder is"
        )
        raise CasemateError(f"{key}.denoiser", source, remedy)
    net = _AtOneLevel(found.network(image_size=side, channels=channels))
    costs = costs_of_shapes(net, image_size=side, channels=channels)
    sampler, sigma = settings.denoising_sampler, settings.noise_sigma
    assert sampler is not None  # sections with a denoiser have a sampler and noise
    assert sigma is not None
    return costs, sampler.num_passes(found.diffusion.schedule, sigma)


def _memory(
    family: AnyFamily, settings: CertificateSettings, model: CostedModel, dtype: str
) -> int:
    """Bytes of a worker at most: all weights, and the activations of its largest batch.

    Denoiser and classifier follow each other without gradients, so the larger of the two would
    nearly do; their sum also covers the images that a sampler holds between its passes.
    """
    one, behind = model.costs, model.denoiser
    return max(
        device_bytes(
            params=one.params + behind.params,
            activation_bytes=one.activation_bytes + kept * behind.activation_bytes,
            micro_batch=batch,
            dtype=dtype,
        )
        for batch, kept in family.batches(settings, model)
    )


def _num_items(
    recipe: Recipe, settings: CertificateSettings, given: int | None, *, key: str
) -> int:
    published = source_info(recipe.data).splits or {}
    known = [n for n in (settings.num_items, given, recipe.data.limits.get("test")) if n]
    if not known and not published.get("test"):
        raise CasemateError(f"{key}.num_items", "", "is not known without the data; give --items N")
    return min(known) if known else int(published["test"])
