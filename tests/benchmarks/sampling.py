"""`make bench`: what noisy copies cost beside the network passes they contain.

Bare passes of denoiser and classifier, the sampling loop of certification (addressed noise, scale,
denoise, classify, collect) and a plain pipeline in the manner of the published code take turns in
one process, on one thread, by its CPU time. Ratios are taken round by round.

Noise is drawn by a thread while the networks compute: where a core is free for it they do not wait.
So there are two rows on a CPU, of the time of all threads and of the thread that computes.

The plain pipeline draws unaddressed noise, runs the whole posterior step of which it needs one
term, enlarges with torch's kernel and moves predictions to the host after every batch.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from components.certify.l2.noise import predict_block
from components.core.seeding import DrawSpan
from components.denoising.classifier import DenoisedClassifier
from components.denoising.diffusion import Diffusion
from components.denoising.loading import denoiser_of
from components.denoising.samplers import OneShot
from components.models.networks.unet import tiny_unet
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from tests.benchmarks.table import clock, device, promise

SIGMA, ROUNDS, SPREAD, MARGIN = 0.5, 9, 0.3, 0.85
SLOWER_REAL, SLOWER_TINY, FASTER = 1.05, 1.20, 1.10
COMPUTING = {"real": 1.02, "tiny": 1.05}  # of the thread that computes
DEMO = {"patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 4}
Case = Callable[[], object]


@dataclass(frozen=True)
class Setup:
    """A denoiser and a classifier with random weights, and how they are asked."""

    title: str
    model: DenoisedClassifier
    image: torch.Tensor
    micro_batch: int
    num_batches: int

    @property
    def num_draws(self) -> int:
        return self.micro_batch * self.num_batches


def setup(
    title: str, *, channels: int, side: int, unet: dict, classifier: str, classifier_side: int,
    options: dict, micro_batch: int, num_batches: int,
) -> Setup:  # fmt: skip
    torch.manual_seed(0)
    half = (0.5,) * channels
    spec = ModelSpec(classifier, 10, channels, classifier_side, half, half, options=options)
    network = tiny_unet(image_size=side, channels=channels, num_classes=0, **unet)
    network = network.to(device())
    denoiser = denoiser_of(network, Diffusion.named("linear", 1000)).with_fast_layout(side)
    model = DenoisedClassifier(
        OneShot(denoiser=denoiser), PixelModel(spec).eval(), image_size=side, sigma=SIGMA
    ).to(device())
    image = torch.rand(channels, side, side).to(device())
    return Setup(title, model, image, micro_batch, num_batches)


SETUPS = {
    "real": lambda: setup(
        "ViT-T 224 behind a small UNet at 224", channels=3, side=224, unet={},
        classifier="vit_tiny_patch16_224", classifier_side=224, options={},
        micro_batch=4, num_batches=3,
    ),
    "tiny": lambda: setup(
        "networks of certify-100k", channels=1, side=32, unet={"widths": (16, 32), "patch": 4},
        classifier="tiny_vit", classifier_side=32, options=DEMO, micro_batch=100, num_batches=5,
    ),
    "other side": lambda: setup(
        "tiny UNet at 32, tiny ViT at 64", channels=3, side=32, unet={}, classifier="tiny_vit",
        classifier_side=64, options=DEMO, micro_batch=50, num_batches=2,
    ),
}  # fmt: skip


def loop(s: Setup) -> None:
    predict_block(
        s.model, s.image, DrawSpan(0, "estimate", "bench", 0, s.num_draws), sigma=SIGMA,
        micro_batch=s.micro_batch, device=device().type,
    )  # fmt: skip


def bare(s: Setup) -> Case:
    """The two networks on what they get in the loop: times of some operations depend on values."""
    nets = (s.model.denoiser.network, s.model.classifier.net)
    seen: list[tuple[torch.Tensor, ...]] = []
    hooks = [net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs)) for net in nets]
    loop(s)
    for hook in hooks:
        hook.remove()
    inputs = [tuple(x.clone() for x in given) for given in seen[:2]]

    def passes() -> None:
        with torch.inference_mode():
            for _ in range(s.num_batches):
                for net, given in zip(nets, inputs, strict=True):
                    net(*given)

    return passes


class Plain:
    """Noise, denoise, classify and count as one would write it down; weights as they come."""

    def __init__(self, s: Setup) -> None:
        self.s, self.classifier = s, s.model.classifier
        network = tiny_unet(image_size=s.image.shape[-1], channels=3, num_classes=0).eval()
        network.load_state_dict(s.model.denoiser.network.state_dict())
        self.network = network.to(device(), memory_format=torch.contiguous_format)
        self.schedule = s.model.denoiser.diffusion.schedule
        self.t = self.schedule.timestep_at_least(SIGMA)

    def __call__(self) -> None:
        counts = [0] * 10
        with torch.inference_mode():
            for _ in range(self.s.num_batches):
                batch = self.s.image.repeat(self.s.micro_batch, 1, 1, 1)
                noise = torch.randn_like(batch)
                for prediction in self.logits(batch, noise).argmax(dim=1).cpu().tolist():
                    counts[prediction] += 1

    def logits(self, batch: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        abar = torch.from_numpy(self.schedule.alphas_cumprod).float().to(batch.device)
        beta = torch.from_numpy(self.schedule.betas).float().to(batch.device)
        times = torch.full((len(batch),), float(self.t), device=batch.device)
        level = abar[self.t].expand(len(batch)).view(-1, 1, 1, 1)
        before = abar[self.t - 1].expand(len(batch)).view(-1, 1, 1, 1)
        step = beta[self.t].expand(len(batch)).view(-1, 1, 1, 1)
        noisy = level.sqrt() * (2 * batch - 1) + (1 - level).sqrt() * noise
        output = self.network(noisy, times)
        clean = ((1 / level).sqrt() * noisy - (1 / level - 1).sqrt() * output).clamp(-1, 1)
        mean = before.sqrt() * step / (1 - level) * clean
        mean = mean + (1 - step).sqrt() * (1 - before) / (1 - level) * noisy
        spread = (step * (1 - before) / (1 - level)).clamp(min=1e-20).log()
        mean + (0.5 * spread).exp() * torch.randn_like(noisy)  # the next state, thrown away
        side = self.classifier.spec.image_size
        seen = F.interpolate((clean + 1) / 2, (side, side), mode="bicubic", antialias=True)
        logits: torch.Tensor = self.classifier(seen)
        return logits


def difference(s: Setup, plain: Plain) -> float:
    """Logits of the two on the same noisy images, at the level that the plain one rounds to."""
    torch.manual_seed(1)
    batch = s.image.repeat(s.micro_batch, 1, 1, 1)
    noise = torch.randn(s.micro_batch, 3, 32, 32).to(device())
    sigma = float(plain.schedule.sigmas[plain.t])
    model = DenoisedClassifier(s.model.sampler, s.model.classifier, image_size=32, sigma=sigma)
    with torch.inference_mode():
        ours = model(batch + sigma * noise)
        return float((ours - plain.logits(batch, noise)).abs().max())


def interleaved(
    cases: dict[str, Case], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        cases[name]()
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            began = clock()
            cases[name]()
            seconds[name].append(clock() - began)
    return seconds


def compare(
    s: Setup,
    above: str,
    below: str,
    cases: dict[str, Case],
    *,
    clock: Callable[[], float] = clock,
) -> dict[str, object]:
    """Median and quartiles of the ratio of two cases; more rounds once where they scatter."""
    for rounds in (ROUNDS, 2 * ROUNDS):
        seconds = interleaved({name: cases[name] for name in (above, below)}, rounds, clock)
        ratios = [a / b for a, b in zip(seconds[above], seconds[below], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        if (high - low) / median <= SPREAD:
            break
    per_draw = {name: statistics.median(values) / s.num_draws for name, values in seconds.items()}
    return {
        "benchmark": f"{above} / {below}, {s.title}", "draws": s.num_draws, "rounds": rounds,
        "ms_per_draw": {name: round(1000 * value, 3) for name, value in per_draw.items()},
        "ratio": [round(value, 3) for value in (low, median, high)],
        "scatters": (high - low) / median > SPREAD,
        "load": round(os.getloadavg()[0], 1), "torch": torch.__version__,
    }  # fmt: skip


def computing_thread(s: Setup, cases: dict[str, Case], *, limit: float) -> bool:
    """The row of the thread that computes, without the one that draws."""
    row = compare(s, "loop", "bare", cases, clock=time.thread_time)
    per_draw = row["ms_per_draw"]
    return promise(
        f"{row['benchmark']}, computing thread",
        ratio=row["ratio"][1],  # type: ignore[index]
        at_most=limit,
        peer=f"bare {per_draw['bare']:.3g} ms a draw",  # type: ignore[index]
        ours=f"loop {per_draw['loop']:.3g} ms a draw",  # type: ignore[index]
    )


def main() -> int:
    torch.set_num_threads(1)
    wanted, failed = sys.argv[1:] or list(SETUPS), False
    for name in wanted:
        s = SETUPS[name]()
        cases: dict[str, Case] = {"loop": lambda s=s: loop(s), "bare": bare(s)}  # type: ignore[misc]
        if name == "other side":
            plain = Plain(s)
            cases["plain"] = plain
            on_cpu = device().type == "cpu"  # the plain one draws in the thread that computes
            row = compare(s, "plain", "loop", cases, clock=time.thread_time if on_cpu else clock)
            row |= {"max_abs_diff": difference(s, plain), "at_least": FASTER}
            low, median, _ = row["ratio"]  # type: ignore[misc]
            close = row["max_abs_diff"] <= 1e-4  # type: ignore[operator]
            limits = {"at_least": FASTER, "kept": low >= MARGIN * FASTER and close}
        else:
            limit = SLOWER_REAL if name == "real" else SLOWER_TINY
            row = compare(s, "loop", "bare", cases) | {"at_most": limit}
            _, median, high = row["ratio"]  # type: ignore[misc]
            limits = {"at_most": limit, "kept": high <= limit / MARGIN}
        if name in COMPUTING and device().type == "cpu":
            failed |= not computing_thread(s, cases, limit=COMPUTING[name])
        print(json.dumps(row), flush=True)
        figures = [f"{who} {ms:.3g} ms a draw" for who, ms in row["ms_per_draw"].items()]  # type: ignore[attr-defined]
        ours, peer = figures if name != "other side" else figures[::-1]
        title = str(row["benchmark"])
        failed |= not promise(title, ratio=median, ours=ours, peer=peer, **limits)  # type: ignore[arg-type]
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
