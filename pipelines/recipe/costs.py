"""What estimates of all stages share: a recipe's items and networks as shapes, speeds, hours.

The module `cost` of a stage answers with a `StepCost` for each step. A step is work of one or more
kinds; each is a number of equal passes, with the FLOPs of a pass and a probe that measures it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from components.attacks.base_settings import AttackSettings
from components.certify.estimate import (
    ACCELERATORS,
    DTYPE_BYTES,
    EFFICIENCY,
    Rate,
    fits,
    measured_rate,
    nominal_rate,
)
from components.core.errors import CasemateError
from components.data.splits import rounded_share
from components.denoising.settings import ARCHITECTURES
from components.models.costs import Costs, costs_of_shapes, network_of_shapes
from pipelines.recipe.facts import known_channels, known_side, source_info
from pipelines.recipe.schema.attack import AttackSection
from pipelines.recipe.schema.recipe import Recipe

if TYPE_CHECKING:
    from pipelines.stages.train.cost import TrainingCost

NUM_CLASSES = 1000  # while the files are not read; the head is a small share of all FLOPs
MACS = 2  # FLOPs of a multiply-accumulate
HERE = "here"
OWN_WORKERS = ("prepare", "train", "tune", "report")  # all other stages share the kept ones
MANIFESTS = 2  # objects of every step besides its files
Row = dict[str, Any]  # of the estimate, as JSON has it


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of some work: by the clock, and of the processor."""

    wall: float
    cpu: float

    def __add__(self, other: "Speed") -> "Speed":
        return Speed(self.wall + other.wall, self.cpu + other.cpu)

    def __mul__(self, factor: float) -> "Speed":
        return Speed(self.wall * factor, self.cpu * factor)

    __rmul__ = __mul__

    def __truediv__(self, count: float) -> "Speed":
        return self * (1 / count)


NO_SPEED = Speed(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TrainingSpeeds:
    """Of a pass in the steps of a training, in its validation, and in the attack on that."""

    steps: Speed
    validation: Speed
    attacked: Speed


class FixedTimes(Protocol):
    """What a flow takes besides passes."""

    def of_step(self, cost: "StepCost", num_workers: int, *, kept: bool) -> "Seconds":
        """What a step starts and writes; `kept`: an earlier step has left its workers to it."""


class Lab(Protocol):
    """Measures work on this machine; stages ask it for what they are made of."""

    @property
    def overheads(self) -> FixedTimes: ...
    def num_workers(self, stage: str) -> int: ...
    def encoding(self, recipe: Recipe) -> Speed: ...
    def training(self, cost: "TrainingCost") -> TrainingSpeeds: ...
    def attack(
        self,
        recipe: Recipe,
        section: AttackSection,
        model: str,
        settings: AttackSettings | None,
    ) -> Speed: ...
    def passes(self, recipe: Recipe, step: str, number: int) -> Speed: ...
    def corrupting(self, recipe: Recipe, num_items: int) -> Speed: ...
    def votes(self, recipe: Recipe, name: str) -> Speed: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a recipe leaves open and an estimate must be told."""

    num_items: int | None = None
    """Test items."""
    num_train: int | None = None
    """Training items."""
    withstand: float | None = None
    """Share of items that no attack breaks; None: a range from none to all."""
    num_workers: int | None = None
    """Workers of each step; None: as the recipe."""

    def between(self, least: float, most: float) -> tuple[float, float]:
        """The range of work that ends early for items that an attack breaks."""
        if self.withstand is None:
            return least, most
        expected = least + self.withstand * (most - least)
        return expected, expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Equal passes of one kind in a step."""

    what: str
    most: float
    """Passes."""
    least: float
    flops: float
    """Of one of them."""
    net: nn.Module | None = None
    """Its width decides the assumed speed."""
    probe: Callable[[Lab], Speed] | None = None
    """Measures a pass on this machine."""
    cpu_seconds: float = 0.0
    """Of other work on CPUs, for all passes together."""
    cpu_probe: Callable[[Lab], Speed] | None = None
    """Measures that work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What one step costs; hardware, speeds and prices come later."""

    step: str
    num_items: int
    works: Sequence[Work] = ()
    memory: int = 0
    """Bytes of a worker in float32 at most."""
    storage: int = 0
    """Bytes that are kept."""
    objects: int = 0
    """Files that are kept."""
    num_workers: int | None = None
    """None: as asked."""
    num_starts: int = 1
    """Times that workers start."""
    assumed: Sequence[str] = ()
    """What the figures hold for."""
    unknown: str = ""
    """Why there are no figures."""
    own: Row = field(default_factory=dict)
    """Further figures of this stage."""

    @property
    def stage(self) -> str:
        return self.step.partition(".")[0]


def unknown_step(step: str, error: CasemateError) -> StepCost:
    """A step whose cost cannot be known here, with the reason."""
    return StepCost(step=step, num_items=0, unknown=str(error))


def known_splits(recipe: Recipe, asked: Question) -> Mapping[str, int | None]:
    """Items of every split, as far as they are known without the data; None: not known."""
    data, found = recipe.data, dict[str, int | None](train=None, val=None, test=None)
    published = dict(source_info(data).splits or {})
    found |= {split: published.get(split) for split in found}
    native = published.get("all") or published.get("train")
    if native:  # what a source lacks is taken from its training items
        shares = {"test": data.test_fraction, "val": data.val_fraction}
        carved = {s: rounded_share(f, native) for s, f in shares.items() if not found[s]}
        found |= {**carved, "train": native - sum(carved.values())}
    given = {"train": asked.num_train, "test": asked.num_items}
    found = {split: given.get(split) or count for split, count in found.items()}
    if found["train"] and not found["val"]:
        found["val"] = rounded_share(data.val_fraction, found["train"])
    limits: Mapping[Any, int] = data.limits
    return {
        split: count if count is None else min(count, limits.get(split, count))
        for split, count in ((s, c or limits.get(s)) for s, c in found.items())
    }


def num_training_items(recipe: Recipe, asked: Question) -> tuple[int, int]:
    """Training and validation items; an error if they are not known without the data."""
    splits = known_splits(recipe, asked)
    train, val = splits["train"], splits["val"]
    if train is None or val is None:
        key = "data.limits.train"
        raise CasemateError(key, "", "is not known without the data; give --train-items N")
    return train, val


def image_bytes(recipe: Recipe) -> int:
    """Of a stored image at most: PNG rarely takes more than the pixels."""
    side = recipe.data.train_size or image_side(recipe)
    return side * side * (known_channels(recipe.data) or 3)


def image_side(recipe: Recipe) -> int:
    """The side of the images; an error if it is not known without the data."""
    side = known_side(recipe.data)
    if side is None:
        raise CasemateError("data.image_size", None, "is open; add --set data.image_size=224")
    return side


@dataclass(frozen=True, slots=True)
class CostedNetwork:
    """A network without weights, and the costs of one image."""

    net: nn.Module
    costs: Costs

    @staticmethod
    def of(
        architecture: str, *, side: int, channels: int, num_classes: int, options: Mapping[str, Any]
    ) -> "CostedNetwork":
        """The network that these settings describe, on images of this side."""
        return _costed(architecture, side, channels, num_classes, json.dumps(dict(options)))

    @property
    def flops(self) -> float:
        """Of a forward pass of one image."""
        return float(MACS * self.costs.flops)

    @property
    def weight_bytes(self) -> int:
        return 4 * self.costs.params


@lru_cache(maxsize=64)
def _costed(
    architecture: str, side: int, channels: int, num_classes: int, options: str
) -> CostedNetwork:
    """Counting takes half a second; several steps of a recipe share networks."""
    size = {"image_size": side, "channels": channels}
    try:
        net = network_of_shapes(
            architecture, num_classes=num_classes, options=json.loads(options), **size
        )
    except RuntimeError as error:  # raised by user code on the meta device
        remedy = f"needs values to be built, costs are counted from shapes alone: {error}"
        raise CasemateError("model.architecture", architecture, remedy) from error
    passed = AtOneLevel(net) if architecture in ARCHITECTURES else net
    return CostedNetwork(net, costs_of_shapes(passed, **size))


class AtOneLevel(nn.Module):
    """A denoising network as a function of images alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.net(images, torch.zeros(len(images), device=images.device))
        return result


def network_of(recipe: Recipe, model: str) -> CostedNetwork:
    """The network of one of the recipe's sections, on its images."""
    section, side = recipe.model_of(model), image_side(recipe)
    return CostedNetwork.of(
        section.architecture,
        side=section.upsample or side,
        channels=known_channels(recipe.data) or 3,
        num_classes=source_info(recipe.data).num_classes or NUM_CLASSES,
        options=section.options,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Workers: on these accelerators, none: all known ones, or with a measured speed."""

    accelerators: Sequence[str]
    dtype: str
    num_workers: int | None = None
    """None: one, here as many as the recipe's cluster section has."""
    passes_per_second: float | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    """Per accelerator and hour, as the user gave them; "" is that of all others."""

    def price_at(self, where: str) -> float | None:
        return self.prices.get(where, self.prices.get(""))

    def places(self) -> list[str]:
        """Where times are estimated."""
        if self.passes_per_second is not None:
            return ["measured"]
        able = [name for name, known in ACCELERATORS.items() if self.dtype in known.peak_tflops]
        # No accelerator has this dtype: the error of the first one lists those it has.
        return list(self.accelerators or able or list(ACCELERATORS)[:1])

    def rate(self, where: str, work: Work) -> Rate:
        """Speed at a place: as given, or a share of the accelerator's peak."""
        if (speed := self.passes_per_second) is not None:
            if not speed > 0:
                remedy = "is not a speed; write a number above 0"
                raise CasemateError("--passes-per-second", speed, remedy)
            return measured_rate(
                flops_per_pass=work.flops or 1.0, passes_per_second=speed, where="as given"
            )
        width = int(getattr(work.net, "num_features", 0))
        return nominal_rate(where, dtype=self.dtype, width=width)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one worker's time: by the clock and of its processor, at least and at most."""

    low: float = 0.0
    high: float = 0.0
    cpu_low: float = 0.0
    cpu_high: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.low + other.low,
            self.high + other.high,
            self.cpu_low + other.cpu_low,
            self.cpu_high + other.cpu_high,
        )


def rows_of(
    costs: Iterable[StepCost],
    hardware: Hardware,
    *,
    lab: Lab | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """The rows of an estimate; with a `lab`, by speeds that it measures on this machine."""
    rows, kept = [], False
    for cost in costs:
        rows.append(_row(cost, hardware, lab, say, kept=kept))
        kept = kept or cost.stage not in OWN_WORKERS
    return rows


def _row(
    cost: StepCost,
    hardware: Hardware,
    lab: Lab | None,
    say: Callable[[str], None],
    *,
    kept: bool,
) -> Row:
    row: Row = {"step": cost.step, "num_items": cost.num_items}
    cost = replace(cost, memory=_memory(cost, hardware.dtype))
    if cost.unknown:
        return {**row, "unknown": cost.unknown, "hours": []}
    num_workers = hardware.num_workers or cost.num_workers
    num_workers = num_workers or (lab.num_workers(cost.stage) if lab else 1)
    least, most = (round(sum(getattr(w, end) for w in cost.works)) for end in ("least", "most"))
    row |= {"passes": most, "least_passes": least, **cost.own}
    row |= {
        "flops": sum(work.most * work.flops for work in cost.works),
        "device_bytes": cost.memory,
        "storage_bytes": cost.storage,
        "objects": cost.objects + MANIFESTS,
        "num_workers": num_workers,
        "assumed": list(cost.assumed),
    }
    if lab is not None:
        say(f"{cost.step}: measuring")
        parts, total = _measured(cost, lab)
        total = _on(num_workers, total) + lab.overheads.of_step(cost, num_workers, kept=kept)
        return {**row, "parts": parts, "hours": [_place(HERE, total, cost, hardware, num_workers)]}
    parts = [
        {"what": work.what, "passes": work.most, "least_passes": work.least} for work in cost.works
    ]
    hours = [
        _place(
            where, _on(num_workers, _nominal(cost, hardware, where)), cost, hardware, num_workers
        )
        for where in hardware.places()
    ]
    return {**row, "parts": parts, "hours": hours}


def _memory(cost: StepCost, dtype: str) -> int:
    """Bytes of a worker; the state of a training stays in float32."""
    if dtype not in DTYPE_BYTES:
        raise CasemateError("dtype", dtype, f"is not one of {', '.join(DTYPE_BYTES)}")
    is_trained = cost.stage in ("train", "tune")
    return cost.memory if is_trained else cost.memory * DTYPE_BYTES[dtype] // DTYPE_BYTES["fp32"]


def _nominal(cost: StepCost, hardware: Hardware, where: str) -> Seconds:
    """One worker at the speed of an accelerator; CPU work comes on top."""
    total = Seconds()
    for work in cost.works:
        rate = hardware.rate(where, work).flops_per_second * EFFICIENCY
        low, high = (passes * work.flops / rate for passes in (work.least, work.most))
        total += Seconds(low + work.cpu_seconds, high + work.cpu_seconds)
    return total


def _measured(cost: StepCost, lab: Lab) -> tuple[list[Row], Seconds]:
    """One worker on this machine, and the speed of each kind of work."""
    parts, total = [], Seconds()
    for work in cost.works:
        part: Row = {"what": work.what, "passes": work.most, "least_passes": work.least}
        if work.most:
            assert work.probe is not None
            speed = work.probe(lab)
            part |= {"seconds": speed.wall, "cpu_seconds": speed.cpu, "rate": "measured here"}
            total += Seconds(
                work.least * speed.wall,
                work.most * speed.wall,
                work.least * speed.cpu,
                work.most * speed.cpu,
            )
        if work.cpu_seconds:
            factor = work.cpu_probe(lab) if work.cpu_probe else None
            wall, cpu = (factor.wall, factor.cpu) if factor else (work.cpu_seconds,) * 2
            total += Seconds(wall, wall, cpu, cpu)
        parts.append(part)
    return parts, total


def _on(num_workers: int, one: Seconds) -> Seconds:
    """The time of several workers at once; their processors' times add up."""
    return Seconds(one.low / num_workers, one.high / num_workers, one.cpu_low, one.cpu_high)


def _place(where: str, total: Seconds, cost: StepCost, hardware: Hardware, num_workers: int) -> Row:
    """Hours at one place, and whether the memory suffices."""
    found: Row = {
        "where": where,
        "low": total.low / 3600,
        "high": total.high / 3600,
        "rate": _source(where, cost, hardware),
        "fits": where not in ACCELERATORS or fits(cost.memory, where),
    }
    if where == HERE:
        found |= {"cpu_low": total.cpu_low / 3600, "cpu_high": total.cpu_high / 3600}
    device_hours = [num_workers * found[end] for end in ("low", "high")]
    found |= dict(zip(("device_hours_low", "device_hours_high"), device_hours, strict=True))
    if (price := hardware.price_at(where)) is not None:
        found |= {"cost_low": price * device_hours[0], "cost_high": price * device_hours[1]}
    return found


def _source(where: str, cost: StepCost, hardware: Hardware) -> str:
    """Where the speed of a step comes from."""
    if where == HERE:
        return "measured here"
    if not any(work.flops for work in cost.works):
        return "no passes of a network"
    return hardware.rate(where, max(cost.works, key=lambda work: work.most * work.flops)).source


def totals(rows: Sequence[Row]) -> Iterator[Row]:
    """The sums of all rows at each place: steps one after the other."""
    places = dict.fromkeys(place["where"] for row in rows for place in row["hours"])
    for where in places:
        own = [place for row in rows for place in row["hours"] if place["where"] == where]
        names = ["low", "high", "device_hours_low", "device_hours_high"]
        names += [n for n in ("cost_low", "cost_high", "cpu_low", "cpu_high") if n in own[0]]
        yield {"where": where} | {name: sum(place[name] for place in own) for name in names}


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """`2.5` for all accelerators, `A100=2.5` for one."""
    found = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if not 0 <= price < float("inf") or bool(equals) != bool(name):
            remedy = "is not a price per accelerator and hour; write e.g. 2.5 or A100=2.5"
            raise CasemateError("--price", text, remedy)
        if name and name not in ACCELERATORS and name != HERE:
            remedy = f"names no accelerator; choose {', '.join(ACCELERATORS)} or {HERE}"
            raise CasemateError("--price", text, remedy)
        found[name] = price
    return found
