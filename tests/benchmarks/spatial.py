"""`make bench`: the spatial grid of 2511 poses by canvases, against 2511 warps of the image.

One process, one thread, process CPU time; both make every pose of the same images, in turns, and
the medians count. A pose must be equal in every bit. Exit code 1 if an image takes more than one
interpolation for each angle, or if a pose differs.

    python -m tests.benchmarks.spatial [NUM_IMAGES] [ROUNDS]
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch

from components.attacks.settings import SpatialSettings
from components.attacks.spatial import Pose, PosedImages, grid_poses, warp
from components.core.types import Images
from tests.benchmarks.table import promise

SIDE = 224
GRID = SpatialSettings(max_shift=16, num_shifts=9, max_angle=30, num_angles=31)


def seconds(at: Callable[[Pose], Images], poses: list[Pose]) -> float:
    """CPU seconds of making every pose."""
    began = time.process_time()
    for pose in poses:
        at(pose)
    return time.process_time() - began


def main() -> int:
    torch.set_num_threads(1)
    arguments = [int(word) for word in sys.argv[1:]]
    num_images, rounds = (arguments + [4, 3][len(arguments) :])[:2]
    x = torch.rand(num_images, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    poses = grid_poses(GRID)
    images = PosedImages(x, poses)
    equal = all(torch.equal(images.at(pose), warp(x, pose)) for pose in poses)
    interpolations = images.num_interpolations
    crops, warps = [], []
    for _ in range(rounds):
        crops.append(seconds(PosedImages(x, poses).at, poses))
        warps.append(seconds(lambda pose: warp(x, pose), poses))
    ours, direct = statistics.median(crops) / num_images, statistics.median(warps) / num_images
    print(json.dumps({
        "benchmark": f"{len(poses)} poses of an image of {SIDE} pixels", "images": num_images,
        "rounds": rounds, "interpolations": interpolations, "equal": equal,
        "cpu_seconds_per_image": round(ours, 4), "direct_warps": round(direct, 4),
        "ratio": round(direct / ours, 1), "load": round(os.getloadavg()[0], 1),
    }))  # fmt: skip
    return int(not promise(
        f"{len(poses)} poses, direct warps / canvases", ratio=direct / ours,
        kept=interpolations <= GRID.num_angles and equal,
        peer=f"direct {direct:.3f} s an image", ours=f"{ours:.3f} s",
    ))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
