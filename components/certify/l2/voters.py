"""Workers that classify noisy draws, and the units that draws are cut into."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from torch import nn

from components.certify.l2.noise import check_draws_alone, float32_at_least, predict_block
from components.certify.l2.radius import Method
from components.certify.l2.sequential import choose_class
from components.certify.l2.settings import GaussianSettings
from components.certify.tasks import VoteSettings, VoteTask, vote_row
from components.certify.vote_rows import SCHEMA
from components.core.arithmetic import EXACT, Arithmetic
from components.core.micro_batch import fastest_micro_batch
from components.core.noise_streams import NoiseKind, noise_stream
from components.core.precision import switches_of
from components.core.seeding import DrawSpan
from components.core.settings import EAGER, FLOAT32
from components.core.types import Array
from components.core.units import Unit
from components.data.prepared import ImageSplit
from components.denoising.classifier import DenoisedClassifier
from components.denoising.loading import (
    denoiser_of,
    describe_source,
    load_denoised,
    source_digest,
)
from components.models.compiling import compile_all
from components.models.networks.unet import TimedUNet
from components.models.pixels import PixelModel


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianVoteSettings(VoteSettings):
    """Settings that noisy draws depend on; `denoiser` describes the one in front of the model."""

    sigma: float
    num_select: int
    num_estimate: int
    run_seed: int
    method: Method
    declared: Mapping[str, Any] | None = None  # for method sequential: when draws end
    denoiser: Mapping[str, Any] | None = None
    noise: NoiseKind = "numpy"  # recorded as the header's `noise_impl`
    precision: str = FLOAT32
    compiled: bool = EAGER
    why_eager: str | None = None  # why networks that should be compiled are not; not recorded
    block_size: int = 0  # draws of a unit, at most; not recorded, votes do not depend on it

    def to_dict(self) -> dict[str, object]:
        values = VoteSettings.to_dict(self) | {
            "sigma": self.sigma,
            "num_select": self.num_select,
            "num_estimate": self.num_estimate,
            "run_seed": self.run_seed,
            "method": self.method,
        }
        optional = {"declared": self.declared, "denoiser": self.denoiser}
        values |= {name: dict(v) for name, v in optional.items() if v is not None}
        values |= {"precision": self.precision} if self.precision != FLOAT32 else {}
        return values | ({"compiled": True} if self.compiled else {})

    @property
    def arithmetic(self) -> Arithmetic:
        return switches_of(self.precision, EXACT)


# Draws per pass that are tried; for method sequential at most MOST_LOOKS looks, since an item draws
# at least one pass.
SIZES = (20, 25, 40, 50, 100, 125, 200, 250, 500, 1000, 2000)
MOST_LOOKS = 4

GaussianTask = VoteTask[GaussianVoteSettings]


@dataclass(frozen=True, slots=True)
class Block:
    """Draws `start..stop-1` of one stream of one test item."""

    item: int
    stream: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of draws."""
        return self.stop - self.start


def describe_denoiser(
    source: str, *, sampler: Mapping[str, object], sigma: float, image_size: int
) -> dict[str, object]:
    """The record of the denoiser: its weights, the noise added, and the timestep it is given."""
    found = describe_source(source)
    network = found.network(image_size=image_size, channels=found.channels)
    assert isinstance(network, TimedUNet)
    return {
        "digest": source_digest(source),
        "sampler": dict(sampler),
        "prediction": found.diffusion.prediction,
        "timestep": denoiser_of(network, found.diffusion).timestep(2 * sigma),
        "sigma_added": float(float32_at_least(sigma)),
    }


def load_noisy_model(task: GaussianTask) -> PixelModel | DenoisedClassifier:
    """The classifier of noisy images: the model alone or behind its denoiser."""
    votes, model = task.votes, task.load_model()
    found: PixelModel | DenoisedClassifier = model
    if task.denoiser is not None and votes.denoiser is not None:
        found = load_denoised(
            model,
            task.denoiser,
            sampler=votes.denoiser["sampler"],
            image_size=task.open_data().width,
            sigma=votes.sigma,
            device=votes.device,
        )
    items = task.items()
    few = items.span(0, min(len(items), 2)).pixels().to(votes.device)
    check_draws_alone(found, few, sigma=votes.sigma)
    return found


class GaussianVoter:
    """Computes the predictions of blocks of noisy draws."""

    def __init__(self, task: GaussianTask) -> None:
        self.settings, self.items = task.votes, task.items()
        self.num_classes = len(task.open_data().classes)
        self.model = load_noisy_model(task)
        if task.votes.compiled and (why := self.compile()):
            raise RuntimeError(f"{why}; it worked where this run was planned")

    def compile(self) -> str | None:
        """Compile the networks, tried by a pass of real draws; the reason if that fails."""
        parts = (self.model,) if isinstance(self.model, PixelModel) else (self.model.classifier,)
        nets: list[nn.Module] = [part.net for part in parts]
        if isinstance(self.model, DenoisedClassifier):
            nets.append(self.model.denoiser.network)
        block = Block(0, "probe", 0, self.settings.micro_batch)
        item = self.items.span(0, 1)
        return compile_all(nets, trial=lambda: self.predictions(item, block))

    def __call__(self, blocks: Iterable[Block]) -> pa.Table:
        rows = []
        for b in blocks:
            item = self.items.span(b.item, b.item + 1)
            chosen = self.settings.method == "sequential" and b.stream == "select"
            predictions = self._select(item, b) if chosen else self.predictions(item, b)
            rows.append(vote_row(item, b.stream, b.start, predictions))
        return pa.Table.from_pylist(rows, schema=SCHEMA)

    def predictions(self, item: ImageSplit, b: Block) -> Array:
        """(stop - start,) uint16 of one item."""
        settings = self.settings
        stream = noise_stream(settings.method, b.stream)
        return predict_block(
            self.model,
            item.pixels()[0],
            DrawSpan(settings.run_seed, stream, item.item_ids[0], b.start, b.stop),
            sigma=settings.sigma,
            micro_batch=settings.micro_batch,
            device=settings.device,
            noise=settings.noise,
            precision=settings.precision,
        )

    def _select(self, item: ImageSplit, b: Block) -> Array:
        """Selecting draws up to the look at which one class leads clearly, at most all of them."""
        found, step = np.empty(0, np.uint16), self.settings.micro_batch
        for start in range(0, b.stop, step):
            part = replace(b, start=start, stop=min(start + step, b.stop))
            found = np.concatenate([found, self.predictions(item, part)])
            selection = choose_class(found, num_classes=self.num_classes, num_select=b.stop)
            if selection:
                return found[: selection.n0]
        raise AssertionError("the last look always chooses")


def fastest_draws(task: GaussianTask) -> int:
    """Draws per pass that are classified fastest, among the divisors of the largest block."""
    voter, votes = GaussianVoter(task), task.votes
    most = votes.block_size if votes.declared is None else MOST_LOOKS * votes.declared["look_every"]
    sizes = [n for n in SIZES if votes.block_size % n == 0 and n <= most] or [votes.block_size]
    item = task.items().span(0, 1)

    def run(size: int) -> object:
        voter.settings = replace(votes, micro_batch=size)
        return voter.predictions(item, Block(0, "probe", 0, size))

    return fastest_micro_batch(run, sizes, device=votes.device)


def draw_units(settings: GaussianSettings, num_items: int) -> list[Unit]:
    """All draws of all items; empty for method sequential, where results decide the next draws."""
    if settings.method == "sequential":
        return []
    starts = range(0, settings.num_estimate, settings.block_size)
    return [draw_unit(settings, item, start) for item in range(num_items) for start in starts]


def draw_unit(settings: GaussianSettings, item: int, start: int) -> Unit:
    """One block of estimating draws; the first also has the selecting draws."""
    blocks = [Block(item, "estimate", start, block_stop(settings, start))]
    if start == 0:
        blocks.insert(0, Block(item, "select", 0, settings.num_select))
    num_draws = sum(block.size for block in blocks)
    share = 0.0 if settings.method == "sequential" else blocks[-1].size / settings.num_estimate
    name = f"item-{item:08d}-draw-{start:09d}"
    return Unit(name, f"test item {item}", tuple(blocks), share, num_draws)


def block_stop(settings: GaussianSettings, start: int) -> int:
    """Where the block of draws from `start` on ends.

    Sequential blocks grow from one micro-batch to `block_size`: easy items stop within the first.
    """
    size = settings.block_size
    if settings.method == "sequential":
        size = min(size, max(settings.planned_micro_batch, start))
    return min(start + size, settings.num_estimate)
