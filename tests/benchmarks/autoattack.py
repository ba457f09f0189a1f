"""`make bench`: AutoAttack standard against pyautoattack's, by processor time, on the same items.

    python -m tests.benchmarks.autoattack [--photos cifar.npz] [--eps 2/255] [--num-items 100]

A small adversarially trained ViT (patch 16, as large models have few tokens) is attacked whole by
both sides in turns, in one process. Without photographs (an npz of x_train, y_train, x_test,
y_test, uint8 and NHWC) the demo's digits are used, under a limit of their own. Neither side may
trade strength for speed: items that only one side breaks are counted. Both get all rows in one
batch; a second row shows the passes of the attack stage, whose number of rows is fixed so that
results do not depend on batches: the last pass of few rows is filled up.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from pyautoattack import AutoAttack as PyAutoAttack

from components.attacks.autoattack import AutoAttack
from components.attacks.gradient import in_fixed_batches
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.core.settings import Fractional
from components.data.prepared import ImageSplit
from components.models.fast import fast_forward
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from components.train.epoch import EpochPlan, train_epoch
from components.train.feed import TrainingSet, Worker
from components.train.objectives.make import make_objective
from components.train.objectives.settings import PgdTrainingSettings
from components.train.session import initial_model
from components.train.settings import TrainSettings
from tests.benchmarks.input import demo_digits
from tests.benchmarks.table import clock, device, promise

OPTIONS = {"patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 3}
NUM_EPOCHS, BATCH = {"photographs": 6, "digits": 30}, 128
ROWS = 35  # of a pass: the default of recipes
FASTER = {"photographs": 2.5, "digits": 1.5}  # theirs / ours
SAME = 1  # items that one side alone breaks, at most


def read_photos(path: Path) -> tuple[ImageSplit, ImageSplit]:
    """Training and test images of an npz file."""
    with np.load(path) as arrays:
        return tuple(
            ImageSplit(
                tuple(f"{part}-{i}" for i in range(len(arrays[f"y_{part}"]))),
                torch.from_numpy(arrays[f"x_{part}"].transpose(0, 3, 1, 2).copy()),
                torch.from_numpy(arrays[f"y_{part}"].astype(np.int64)),
            )
            for part in ("train", "test")
        )  # type: ignore[return-value]


def digits() -> tuple[ImageSplit, ImageSplit]:
    """They come sorted by their labels."""
    split = demo_digits(2500).real
    order = torch.randperm(2500, generator=torch.Generator().manual_seed(0))
    return split.rows(order[:2000]), split.rows(order[2000:])


def trained(train: ImageSplit, *, eps: float, num_epochs: int) -> PixelModel:
    """A small ViT after some epochs of PGD training."""
    channels, side = train.images.shape[1], train.images.shape[-1]
    middle = (0.5,) * channels
    spec = ModelSpec("tiny_vit", 10, channels, side, middle, middle, options=OPTIONS)
    model = initial_model(spec, seed=0).to(device())
    plan = EpochPlan(TrainSettings(batch_size=BATCH), seed=0, epochs=num_epochs, image_size=side)
    settings = PgdTrainingSettings(eps=eps, num_steps=2)
    objective, updater = make_objective(settings, label_smoothing=0.0), plan.updater(model)
    for epoch in range(num_epochs):
        train_epoch(
            model, model, TrainingSet(train), objective, updater,
            plan=plan, epoch=epoch, worker=Worker(),
        )  # fmt: skip
    return model.eval()


def ours(
    model: PixelModel, items: Items, eps: float, *, rows: int | None = None
) -> tuple[float, torch.Tensor]:
    """Seconds, and which items are robust; `rows` in every pass, else all in one."""
    began = clock()
    with attack_mode(model), fast_forward(model.net):
        attack = AutoAttack(norm="linf", eps=eps)
        found = attack(in_fixed_batches(model, size=rows) if rows else model, items)
    return clock() - began, found.adversarial_prediction == items.y


def theirs(model: PixelModel, items: Items, eps: float, *, seed: int) -> tuple[float, torch.Tensor]:
    began = clock()
    attack = PyAutoAttack(model, eps=eps, norm="Linf", seed=seed, device=items.x.device)
    result = attack.run_standard_evaluation(items.x, items.y, batch_size=len(items))
    seconds = clock() - began
    x_adv = result[0] if isinstance(result, tuple) else result
    with torch.no_grad():
        return seconds, model(x_adv).argmax(dim=1) == items.y


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--eps", type=Fractional.read)
    parser.add_argument("--num-items", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    eps = asked.eps or (2 / 255 if asked.photos else 0.05)
    train, test = read_photos(asked.photos) if asked.photos else digits()
    data = "photographs" if asked.photos else "digits"
    model = trained(train, eps=eps, num_epochs=NUM_EPOCHS[data])
    few = test.rows(torch.arange(asked.num_items))
    items = Items(few.pixels().to(device()), few.labels.to(device()), few.item_ids, run_seed=0)
    times, alone = [], 0
    for seed in range(asked.rounds):
        with torch.no_grad():
            model(items.x)
        peer, standing = theirs(model, items, eps, seed=seed)
        seeded = replace(items, run_seed=seed)
        own, robust = ours(model, seeded, eps)
        fixed, again = ours(model, seeded, eps, rows=ROWS)
        alone = max(alone, *(int((standing != found).sum()) for found in (robust, again)))
        times.append((peer, own, fixed))
        line = f"seed {seed}: pyautoattack {peer:.1f} s, {int(standing.sum())} robust; "
        print(f"{line}ours {own:.1f} s, {int(robust.sum())} robust; {alone} differ", flush=True)
    faster = statistics.median(peer / own for peer, own, _ in times)
    seconds = [statistics.median(side) for side in zip(*times, strict=True)]
    promise(
        f"the same in passes of {ROWS} rows",
        ratio=statistics.median(peer / fixed for peer, _, fixed in times),
        peer=f"pyautoattack {seconds[0]:.1f} s",
        ours=f"{seconds[2]:.1f} s",
    )
    return int(
        not promise(
            f"AutoAttack standard, {len(items)} {data}, theirs / ours",
            ratio=faster,
            at_least=FASTER[data],
            kept=alone <= SAME,
            peer=f"pyautoattack {seconds[0]:.1f} s",
            ours=f"{seconds[1]:.1f} s, {alone} items differ",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
