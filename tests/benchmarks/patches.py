"""`make bench`: our votes on column ablations against plain code for the same votes.

Plain code is a loop over the ablations, each a batch of all images: `masked` blackens pixels and
keeps every token; `dropped` also removes the tokens without a visible pixel, before the blocks,
with plain attention. Both are written here. `dropped` and ours must give the same votes before
anything is timed. One process, one thread, time of the processor, turns that rotate; ratios are
taken round by round and shown as `median [lower quartile, upper quartile]`. The expensive `masked`
runs on every fourth ablation and is scaled.

The share of a matrix product of the model's own shape is the figure that carries over to other
machines. Peak memory is that of fresh processes with ViT-B: more columns, and squares whose masks
alone would take hundreds of megabytes, must not take more. A plot, `bench-patches.svg`, shows time
against images and against the width of the bands.
`python -m tests.benchmarks.patches CASE ...` runs some cases only, `--rounds N` fewer rounds.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import timm
import torch
from torch import Tensor

from components.data.ablation import Ablations, ablate
from components.models.attention.shadow import shadowed
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from components.models.tokens import patch_size_of, visible_tokens
from components.models.voting import AblationPredictor, ablation_predictions
from tests.benchmarks.table import clock, device, promise

SIDE, BAND, MICRO_BATCH = 224, 19, 28
LOWER = 0.85  # the lower quartile may stay this far below the limit
WIDE = 0.3  # quartiles further apart than this share of the median: measure twice as often
MEMORY_LIMIT_MB = 2048
PLOT = Path("bench-patches.svg")


@dataclass(frozen=True, slots=True)
class Case:
    """Our votes against one kind of plain code."""

    architecture: str
    images: int
    stride: int
    plain: str
    limit: float
    goal: float  # share of the speed of a matrix product
    turns: int = 1  # rounds count this often: short ones need more
    side: int = SIDE
    band: int = BAND
    micro_batch: int = MICRO_BATCH
    builds: bool = False  # whether our time includes what is built for a model

    @property
    def ablations(self) -> Ablations:
        size = (self.side, self.side)
        return Ablations(kind="columns", image_size=size, band=self.band, stride=self.stride)


TINY, SMALL, BASE = (f"deit_{size}_patch16_224" for size in ("tiny", "small", "base"))
CIFAR = "tiny_vit"
CASES = {
    "tiny-1": Case(TINY, 1, 10, "dropped", 3.5, 0.7, turns=4),
    "tiny-4": Case(TINY, 4, 10, "dropped", 1.9, 0.7),
    "small-2": Case(SMALL, 2, 10, "dropped", 1.85, 0.9),
    "cifar-64": Case(  # with the rows that recipes take by default
        CIFAR, 64, 10, "dropped", 1.25, 0.7, turns=4, side=32, band=4, micro_batch=64, builds=True
    ),
    "tiny-masked": Case(TINY, 4, 10, "masked", 7.0, 0.7),
    "tiny-stride-1": Case(TINY, 2, 1, "dropped", 2.0, 0.7),
}


def new_model(architecture: str, side: int = SIDE) -> PixelModel:
    """Random weights; a head whose logits differ by about 1, as those of trained networks do."""
    torch.manual_seed(0)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    options = {"patch_size": 4, "embed_dim": 64, "depth": 4} if architecture == CIFAR else {}
    spec = ModelSpec(architecture, 1000, 3, side, mean, std, token_policy="drop", options=options)
    model = PixelModel(spec)
    torch.nn.init.normal_(model.net.head.weight, std=model.net.embed_dim**-0.5)
    return model.eval().to(device())


def columns(*, stride: int, band: int = BAND, kind: str = "columns") -> Ablations:
    return Ablations(kind=kind, image_size=(SIDE, SIDE), band=band, stride=stride)


@torch.inference_mode()
def plain_votes(model: PixelModel, images: Tensor, masks: Tensor, *, drop: bool) -> Tensor:
    """The loop that everybody writes first."""
    net, votes = model.net, []
    with ExitStack() as stack:
        for block in net.blocks:
            stack.enter_context(shadowed(block.attn, "fused_attn", not drop))
        for mask in masks:
            inputs = (ablate(images, mask.to(images.device)) - model.mean) / model.std
            tokens = net._pos_embed(net.patch_embed(inputs))
            if drop:
                kept = visible_tokens(mask[None], patch_size_of(net))[0].nonzero()[:, 0]
                kept, prefix = kept.to(tokens.device), torch.arange(net.num_prefix_tokens)
                prefix = prefix.to(tokens.device)
                tokens = tokens[:, torch.cat([prefix, kept + len(prefix)])]
            features = net.norm(net.blocks(net.norm_pre(tokens)))
            votes.append(net.forward_head(features).argmax(dim=1).cpu())
    return torch.stack(votes, dim=1)


def noise(count: int, side: int = SIDE) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 3, side, side, generator=generator).to(device())


def interleave(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each case in each round; every round starts with another case."""
    names, seconds = list(cases), {name: [] for name in cases}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = clock()
            cases[name]()
            seconds[name].append(clock() - began)
    return seconds


def flops_of(model: PixelModel, ablations: Ablations) -> float:
    """Of our way through one image: the last block computes one query and one token's MLP."""
    net, total = model.net, 0
    width, depth = net.embed_dim, len(net.blocks)
    for kept in model.kept_tokens(ablations.masks()).sum(dim=1).tolist():
        length = kept + net.num_prefix_tokens
        block = 24 * length * width**2 + 4 * length**2 * width
        last = (4 * length + 20) * width**2 + 4 * length * width
        total += (depth - 1) * block + last
    return float(total)


def product(width: int) -> tuple[Callable[[], object], float]:
    """A matrix product of the MLP's shape, often enough to be timed, and its FLOPs."""
    tokens = torch.rand(MICRO_BATCH * 29, width, device=device())
    weight = torch.rand(width, 4 * width, device=device())
    times = max(1, int(4e9 / (8 * len(tokens) * width**2)))

    def run() -> None:
        for _ in range(times):
            torch.mm(tokens, weight)

    return run, times * 8.0 * len(tokens) * width**2


def spread(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def contest(name: str, case: Case, rounds: int) -> bool:
    """Time one case and print its row; whether it reached its limit."""
    model, ablations = new_model(case.architecture, case.side), case.ablations
    images = noise(case.images, case.side)
    masks = ablations.masks()
    step = 4 if case.plain == "masked" else 1
    run_product, product_flops = product(model.net.embed_dim)

    predictor = AblationPredictor(model, ablations, micro_batch=case.micro_batch)

    def ours() -> Tensor:
        own = predictor
        if case.builds:
            own = AblationPredictor(model, ablations, micro_batch=case.micro_batch)
        return own(images)

    expected = plain_votes(model, images, masks, drop=True)
    if not torch.equal(ours().cpu(), expected):
        raise AssertionError(f"{name}: fast votes differ from the plain loop's")
    runs = {
        "plain": lambda: plain_votes(model, images, masks[::step], drop=case.plain == "dropped"),
        "ours": ours,
        "product": run_product,
    }
    runs["plain"](), run_product()  # ours is warm
    scale = len(masks) / len(masks[::step])
    seconds = interleave(runs, rounds)
    ratios = _ratios(seconds, scale)
    middle, low, high = spread(ratios)
    if (high - low) / middle > WIDE:
        more = interleave(runs, rounds)
        seconds = {key: seconds[key] + more[key] for key in seconds}
        middle, low, high = spread(_ratios(seconds, scale))
    work = case.images * flops_of(model, ablations) / product_flops
    share = [work * p / o for p, o in zip(seconds["product"], seconds["ours"], strict=True)]
    rate = product_flops / statistics.median(seconds["product"]) / 1e9
    passed = middle >= case.limit and low >= LOWER * case.limit
    print(json.dumps({
        "benchmark": f"patch votes {name}, {case.plain} / ours",
        "model": case.architecture, "images": case.images, "stride": case.stride, "band": case.band,
        "ratio": [round(value, 2) for value in (middle, low, high)], "limit": case.limit,
        "passed": passed, "conclusive": (high - low) / middle <= WIDE,
        "rounds": len(seconds["ours"]), "plain_on_every": step,
        "share_of_matmul": round(statistics.median(share), 2), "goal_of_share": case.goal,
        "matmul_gflops": round(rate), "votes_equal": True,
        "logit_difference": predictor.difference_to_plain(),
        "load": round(os.getloadavg()[0], 1), **machine(),
    }))  # fmt: skip
    plain, own = (statistics.median(seconds[key]) for key in ("plain", "ours"))
    return promise(
        f"patch votes {name}, plain / ours", ratio=middle, at_least=case.limit, kept=passed,
        peer=f"{case.plain} loop {scale * plain:.3f} s", ours=f"{own:.3f} s",
    )  # fmt: skip


def _ratios(seconds: dict[str, list[float]], scale: float) -> list[float]:
    pairs = zip(seconds["plain"], seconds["ours"], strict=True)
    return [scale * plain / ours for plain, ours in pairs]


def machine() -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


MEMORY = {  # ablations; how many of them are asked, spread evenly: all squares would take minutes
    "7 columns": (columns(stride=32), 7),
    "56 columns": (columns(stride=4), 56),
    "3136 squares": (columns(stride=4, band=75, kind="blocks"), 28),
}


def peak_memory(name: str) -> None:
    """In a process of its own: ViT-B on one image; prints the peak of resident memory in MB."""
    model, (ablations, count) = new_model(BASE), MEMORY[name]
    image = noise(1)
    order = range(0, len(ablations), len(ablations) // count)
    ablation_predictions(model, image, ablations, micro_batch=MICRO_BATCH, order=order)
    # VmHWM, not ru_maxrss: the latter remembers the parent that started us
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    print(int(peak[1]) / 1024)


def memory_case() -> bool:
    """The more ablations, the same memory."""
    command = [sys.executable, "-m", "tests.benchmarks.patches", "--peak"]
    peaks = {
        name: float(subprocess.run([*command, name], capture_output=True, check=True).stdout)
        for name in MEMORY
    }
    passed = max(peaks.values()) < min(MEMORY_LIMIT_MB, 1.1 * peaks["7 columns"])
    print(json.dumps({
        "benchmark": "patch votes, peak memory of ViT-B",
        "peak_mb": {name: round(peak) for name, peak in peaks.items()},
        "limit_mb": MEMORY_LIMIT_MB, "passed": passed,
    }))  # fmt: skip
    most = max(peaks.values())
    return promise(
        "patch votes, peak memory of ViT-B over that of 7 columns", ratio=most / peaks["7 columns"],
        at_most=1.1, kept=passed, ours=f"{most:.0f} MB",
    )  # fmt: skip


def growth_case(rounds: int) -> bool:
    """Time against the number of images and against the width of the bands, as a plot."""
    model = new_model(TINY)
    images = noise(8)

    def run(count: int, band: int) -> Callable[[], object]:
        ablations = columns(stride=16, band=band)
        return lambda: ablation_predictions(
            model, images[:count], ablations, micro_batch=MICRO_BATCH
        )

    counts, bands = (2, 4, 6, 8), (16, 48, 80, 112)
    runs = {f"images {n}": run(n, 17) for n in counts} | {f"band {b}": run(2, b) for b in bands}
    interleave(runs, 1)  # warm
    seconds = {name: statistics.median(times) for name, times in interleave(runs, rounds).items()}
    lines = {
        "images": (counts, [seconds[f"images {n}"] for n in counts]),
        "band": (bands, [seconds[f"band {b}"] for b in bands]),
    }
    fits = {name: _linearity(*line) for name, line in lines.items()}
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for axis, (name, (places, times)) in zip(axes, lines.items(), strict=True):
        axis.plot(places, [t / times[0] for t in times], "o-")
        axis.set(xlabel=f"{name}{' (pixels)' * (name == 'band')}", ylabel="time / first", ylim=0)
    figure.savefig(PLOT)
    relative = {name: [round(t / ts[0], 2) for t in ts] for name, (_, ts) in lines.items()}
    passed = min(fits.values()) > 0.95
    print(json.dumps({
        "benchmark": "patch votes, growth of the cost", "plot": str(PLOT),
        "relative_time": relative,
        "r_squared_of_a_line": {k: round(fit, 4) for k, fit in fits.items()},
        "limit": 0.95, "passed": passed,
    }))  # fmt: skip
    return promise(
        "patch votes, r squared of time over images and bands", ratio=min(fits.values()),
        at_least=0.95, kept=passed,
    )  # fmt: skip


def _linearity(places: tuple[int, ...], times: list[float]) -> float:
    return statistics.correlation([float(place) for place in places], times) ** 2


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", choices=[*CASES, "memory", "growth", []])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peak", choices=MEMORY)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak is not None:
        peak_memory(options.peak)
        return 0
    chosen = options.cases or [*CASES, "memory", "growth"]
    passed = [
        contest(name, CASES[name], options.rounds * CASES[name].turns)
        for name in chosen
        if name in CASES
    ]
    if "memory" in chosen:
        passed.append(memory_case())
    if "growth" in chosen:
        passed.append(growth_case(options.rounds))
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
