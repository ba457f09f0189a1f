"""`make bench`: CPU seconds that all 95 corrupted variants of one 224-pixel image cost.

One process, one thread, process CPU time, a batch of 32 images; tables and textures are made in a
first call that does not count. Each severity runs several times and the median counts. Beside it
the plain loop of `glass_blur`, image by image as published, in the same process: what batching and
pointer jumping save. Exit code 1 if the 95 variants take longer than promised.

    python -m tests.benchmarks.corruptions [NUM_IMAGES] [ROUNDS]
"""

import json
import os
import statistics
import sys
import time

import numpy as np
import torch
from scipy import ndimage

from components.data.corruptions import corrupt
from components.data.corruptions.generate import corruption
from components.data.sources.names import CORRUPTIONS, SEVERITIES
from tests.benchmarks.table import promise

SIDE, AT_MOST = 224, 0.35  # seconds per image


def photos(count: int) -> np.ndarray:
    """Smooth random colours."""
    noise = np.random.default_rng(0).normal(size=(count, SIDE, SIDE, 3))
    smooth = ndimage.gaussian_filter(noise, (0, 4, 4, 0))
    return np.clip(128 + 1200 * smooth, 0, 255).astype(np.uint8)


def seconds(images: np.ndarray, name: str, severity: int, rounds: int) -> float:
    """Median CPU seconds per image."""
    item_ids = [f"bench-{number}" for number in range(len(images))]
    settings = {"name": name, "severity": severity, "seed": 0}
    corrupt(images[:1], item_ids=item_ids[:1], **settings)
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        corrupt(images, item_ids=item_ids, **settings)
        taken.append((time.process_time() - began) / len(images))
    return statistics.median(taken)


def plain_glass(image: np.ndarray, severity: int) -> float:
    """CPU seconds of the published loop over pixels, filters included."""
    operator = corruption("glass_blur")
    sigma, delta, _ = operator.constants(severity, SIDE, SIDE)
    draws = operator.sample(torch.Generator().manual_seed(0), SIDE, SIDE, severity)
    began = time.process_time()
    y = (ndimage.gaussian_filter(image / 255, (sigma, sigma, 0), mode="nearest") * 255).astype("u1")
    for shifts in draws["shifts"].numpy():
        for row in range(SIDE - delta, delta, -1):
            for column in range(SIDE - delta, delta, -1):
                dx, dy = shifts[:, row - delta - 1, column - delta - 1]
                y[row, column] = y[row + dy, column + dx]
    ndimage.gaussian_filter(y / 255, (sigma, sigma, 0), mode="nearest")
    return time.process_time() - began


def main() -> int:
    torch.set_num_threads(1)
    arguments = [int(word) for word in sys.argv[1:]]
    num_images, rounds = (arguments + [32, 3][len(arguments) :])[:2]
    images = photos(num_images)
    table = {
        name: [seconds(images, name, level, rounds) for level in SEVERITIES] for name in CORRUPTIONS
    }
    for name, row in table.items():
        print(f"{name:20s}", *(f"{1000 * value:7.2f}" for value in row), "ms", flush=True)
    total = sum(map(sum, table.values()))
    plain = sum(plain_glass(images[0], level) for level in SEVERITIES)
    print(json.dumps({
        "benchmark": f"95 corruptions of an image of {SIDE} pixels", "images": num_images,
        "rounds": rounds, "cpu_seconds_per_image": round(total, 4), "at_most": AT_MOST,
        "glass_plain_over_batched": round(plain / sum(table["glass_blur"]), 1),
        "load": round(os.getloadavg()[0], 1), "torch": torch.__version__,
    }))  # fmt: skip
    promise(
        "glass_blur, plain loop / ours", ratio=plain / sum(table["glass_blur"]),
        peer=f"plain loop {plain:.3f} s", ours=f"{sum(table['glass_blur']):.4f} s",
    )  # fmt: skip
    return int(not promise(
        f"CPU seconds of 95 corruptions of an image of {SIDE} pixels", ratio=total,
        at_most=AT_MOST, ours=f"{total:.3f} s",
    ))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
