"""Cost estimates of a recipe's certificates, from shapes alone: no data or weights are read."""

from components.certify.cost import NO_DENOISER, CostedModel
from components.certify.estimate import VOTE_BYTES, device_bytes
from components.certify.family import AnyFamily
from components.certify.registry import family_of
from components.certify.settings import CertificateSettings
from components.core.errors import CasemateError
from components.models.costs import Costs, costs_of_shapes
from pipelines.recipe import denoisers
from pipelines.recipe.costs import (
    NUM_CLASSES,
    AtOneLevel,
    CostedNetwork,
    Question,
    StepCost,
    Work,
    image_side,
    known_splits,
)
from pipelines.recipe.facts import known_channels, source_info
from pipelines.recipe.schema.recipe import Recipe

CLAIM_BYTES = 100  # of an item in the certificates
FILES = 3  # votes.parquet, certificates.parquet, certificate.json


def costs_of(recipe: Recipe, asked: Question) -> list[StepCost]:
    """One step per certificate that votes, with the attack that challenges it.

    Entries of a sweep that take their part of finer votes cost nothing and have no row.
    """
    return [
        _step(recipe, name, entry.section, asked)
        for name, entry in recipe.certificates().items()
        if not entry.finer
    ]


def _step(recipe: Recipe, name: str, settings: CertificateSettings, asked: Question) -> StepCost:
    key = f"certify.{name}"
    family, model = family_of(settings.kind), _model(recipe, settings, key=key)
    count = _num_items(recipe, settings, asked.num_items, key=key)
    work = family.work(settings, model, num_items=count)
    least = family.least_share(settings, passes_per_item=work.passes_per_item)
    flops, votes_bytes = work.flops_per_item / work.passes_per_item, VOTE_BYTES * work.passes
    votes = Work(
        what="votes",
        most=work.passes,
        least=least * work.passes,
        flops=flops,
        net=model.net,
        probe=lambda lab: lab.votes(recipe, name),
    )
    works = [votes]
    if settings.challenge:
        attacked = min(settings.challenge.num_items, count)
        most = attacked * family.challenge_votes(
            settings, model, passes_per_item=work.passes_per_item
        )
        low, high = asked.between(0.0, most)
        works.append(
            Work(
                what="challenge",
                most=high,
                least=low,
                flops=flops,
                net=model.net,
                probe=lambda lab: lab.votes(recipe, name),
            )
        )
    assumed = []
    if least < 1:
        assumed.append(f"items stop early: from {least:.2g} to all of the votes")
    if settings.challenge:
        assumed.append("from none to all challenged items withstand their attack")
    return StepCost(
        step=key,
        num_items=count,
        works=works,
        memory=_memory(family, settings, model, "fp32"),
        storage=votes_bytes + CLAIM_BYTES * count,
        objects=FILES + bool(settings.challenge),
        assumed=assumed,
        own={"passes": work.passes, "each": family.vote_unit, "votes_bytes": votes_bytes},
    )


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
    net = AtOneLevel(found.network(image_size=side, channels=channels))
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
    known = known_splits(recipe, Question(num_items=given))["test"]
    found = [n for n in (settings.num_items, given, known) if n]
    if not found:
        raise CasemateError(f"{key}.num_items", "", "is not known without the data; give --items N")
    return min(found)
