"""`make bench`: a lesion study with shared blocks against plain passes, and correlation in memory.

The study removes every block, attention and MLP of a 12-block ViT, alone and in sampled sets: 673
forward passes. Plain passes use `removed` of `models/attention/lesions.py` one by one; shared ones
keep the outputs of the blocks before the first difference. Same predictions, both sides in turns in
one process on one thread; the median of the ratios of CPU time counts. Then the correlation of
all blocks on 4,096 images, streamed: how much the resident memory rises above that of 64 images.
Exit code 1 if a promise is broken.

    python -m tests.benchmarks.lesions [NUM_IMAGES] [ROUNDS]
"""

import json
import os
import resource
import statistics
import sys
from collections.abc import Sequence

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from components.analyze.blocks import find_blocks
from components.analyze.correlation import pearson_states
from components.analyze.lesions import Lesion, lesion_predictions, lesions_of
from components.analyze.settings import CorrelationSettings, LesionSettings
from components.attacks.gradients import attack_mode
from components.core.types import IntArray
from components.models.attention.lesions import removed
from tests.benchmarks.table import clock, device, promise

FASTER = 1.7  # CPU time, plain / shared
NUM_CORRELATED, FIRST, BATCH = 4096, 64, 32
RISE = 64  # MiB that the other images may add to those of the first ones


def network() -> nn.Module:
    """Twelve blocks in the proportions of ViT-Ti/16: 65 tokens of 64 channels."""
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 12, "num_heads": 4}
    return VisionTransformer(**sizes, num_classes=10).eval().to(device())


def plain_study(net: nn.Module, x: torch.Tensor, lesions: Sequence[Lesion]) -> IntArray:
    found = []
    for lesion in lesions:
        with removed(net, [(place, lesion.part) for place in lesion.places]), torch.no_grad():
            found.append(net(x).argmax(dim=1).cpu().numpy())
    return np.stack(found)


def studies(num_images: int, rounds: int) -> tuple[list[float], int, bool]:
    """Ratios of CPU time, the number of lesions, and whether all predictions agree."""
    net = network()
    blocks = find_blocks(net)
    lesions = lesions_of(blocks, LesionSettings(), seed=0)
    x = torch.rand(num_images, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    x = x.to(device())
    ratios, same = [], True
    with attack_mode(net):
        net(x)
        for _ in range(rounds):
            marks = [clock()]
            expected = plain_study(net, x, lesions)
            marks.append(clock())
            found = lesion_predictions(net, blocks, x, lesions)
            marks.append(clock())
            ratios.append((marks[1] - marks[0]) / (marks[2] - marks[1]))
            same &= bool((found == expected).all())
    return ratios, len(lesions), same


def memory_rise() -> tuple[float, float]:
    """MiB of peak memory after the first images, and what the other images add to it."""
    net = network()
    blocks, how = find_blocks(net), CorrelationSettings()
    state, peaks = None, []
    with attack_mode(net):
        for start in range(0, NUM_CORRELATED, BATCH):
            generator = torch.Generator().manual_seed(start)
            x = torch.rand(BATCH, 3, 32, 32, generator=generator).to(device())
            found = pearson_states(net, blocks, x, how)["all"]
            state = found if state is None else state.merged(found)  # type: ignore[arg-type]
            if start + BATCH in (FIRST, NUM_CORRELATED):
                peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return peaks[0], peaks[1] - peaks[0]


def main() -> int:
    torch.set_num_threads(1)
    arguments = [int(word) for word in sys.argv[1:]]
    num_images, rounds = (arguments + [16, 3][len(arguments) :])[:2]
    first, rise = memory_rise()  # before the studies, whose own peak would hide it
    ratios, num_lesions, same = studies(num_images, rounds)
    faster = statistics.median(ratios)
    load = round(os.getloadavg()[0], 1)
    print(json.dumps({
        "benchmark": "lesion study, plain / shared blocks", "lesions": num_lesions,
        "images": num_images, "ratios": [round(ratio, 2) for ratio in ratios],
        "median_ratio": round(faster, 2), "limit": FASTER, "same_predictions": same, "load": load,
    }))  # fmt: skip
    print(json.dumps({
        "benchmark": f"correlation of 12 blocks on {NUM_CORRELATED} images, streamed",
        "peak_mib_of_the_first_64": round(first), "rise_mib": round(rise, 1), "limit": RISE,
    }))  # fmt: skip
    kept = [
        promise(
            "lesion study, plain passes / shared blocks", ratio=faster, at_least=FASTER, kept=same,
            peer="plain passes", ours=f"{num_lesions} lesions",
        ),
        promise(
            f"MiB that {NUM_CORRELATED} correlated images add to {FIRST}", ratio=rise,
            at_most=RISE, ours=f"{rise:.1f} MiB",
        ),
    ]  # fmt: skip
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
