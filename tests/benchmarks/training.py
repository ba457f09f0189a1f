"""`make bench`: what a training step costs, relative to a plain forward and backward pass.

Adversarial steps on a 32 x 32 ViT, ablated steps on ViT-T at 224 with and without token dropping.
All kinds of step take turns in one process. Ratios are taken round by round and their median is
compared with the limit. Naive adversarial steps (`.backward()` in the attack, a clean pass with its
graph) cost 2.1, 11.8 and 13.2 plain ones.
"""

import json
import statistics
import sys
from collections.abc import Mapping

import torch

from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from components.train.objectives import settings as s
from components.train.objectives.base import Batch, Objective
from components.train.objectives.make import make_objective
from tests.benchmarks.table import clock, device, promise

NUM_ROUNDS = 8  # after one that warms up
EPS = 8 / 255
COSTLIEST = {"fgsm": 1.6, "pgd-10": 7.0, "trades-10": 8.5}  # times a plain step
FASTER = 2.5  # ablated step: all tokens / kept tokens
SMALL = {"patch_size": 4, "embed_dim": 192, "depth": 4, "num_heads": 3}  # a third of ViT-T

Step = tuple[Objective, PixelModel, tuple[int, ...]]  # what is minimised, on what, images' shape


def adversarial_steps() -> dict[str, Step]:
    spec = ModelSpec("tiny_vit", 10, 3, 32, (0.5,) * 3, (0.5,) * 3, options=SMALL)
    model, shape = PixelModel(spec).to(device()), (16, 3, 32, 32)
    objectives = {
        "plain": s.StandardSettings(),
        "fgsm": s.FgsmTrainingSettings(eps=EPS, clean_forward="none"),
        "pgd-10": s.PgdTrainingSettings(eps=EPS, num_steps=10, clean_forward="none"),
        "trades-10": s.TradesSettings(eps=EPS, num_steps=10),
    }
    return {
        name: (make_objective(settings, label_smoothing=0.0), model, shape)
        for name, settings in objectives.items()
    }


def ablated_steps() -> dict[str, Step]:
    steps = {}
    for policy in ("mask", "drop"):
        spec = ModelSpec(
            "vit_tiny_patch16_224", 10, 3, 224, (0.5,) * 3, (0.5,) * 3, token_policy=policy
        )
        objective = make_objective(s.ColumnsTrainingSettings(band=19), label_smoothing=0.0)
        steps[policy] = (objective, PixelModel(spec).to(device()), (8, 3, 224, 224))
    return steps


def seconds_of(step: Step, number: int) -> float:
    """Loss and gradients of one step; the optimiser costs the same in all of them.

    Time of this process on its one thread: what else runs on the machine does not count.
    """
    objective, model, shape = step
    generator = torch.Generator().manual_seed(number)
    images = torch.rand(shape, generator=generator).to(device())
    labels = torch.randint(10, shape[:1], generator=generator).to(device())
    ids = tuple(map(str, range(len(labels))))
    noise = objective.start_noise(ids, shape[1:], run_seed=0, epoch=0)  # feed threads draw it
    batch = Batch(images, labels, ids, 0, 0, number, start_noise=noise)
    model.train()
    model.zero_grad()
    began = clock()
    objective.loss(model, model, batch).loss.backward()
    return clock() - began


def interleaved(steps: Mapping[str, Step]) -> dict[str, list[float]]:
    """Seconds of every kind of step, round by round."""
    rounds = [
        {name: seconds_of(step, number) for name, step in steps.items()}
        for number in range(NUM_ROUNDS + 1)
    ][1:]
    return {name: [one[name] for one in rounds] for name in steps}


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def sides(seconds: Mapping[str, list[float]], ours: str, peer: str) -> dict[str, str]:
    """Median seconds of both sides, for the table."""
    own, other = (f"{name} {statistics.median(seconds[name]):.3f} s" for name in (ours, peer))
    return {"ours": own, "peer": other}


def report(title: str, seconds: Mapping[str, list[float]], *, ratio: float, limit: float) -> None:
    shown = {name: [round(value, 3) for value in values] for name, values in seconds.items()}
    verdict = {"median_ratio": round(ratio, 2), "limit": limit}
    print(json.dumps({"benchmark": title, "seconds": shown, **verdict}))


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    failed = False
    seconds = interleaved(adversarial_steps())
    for name, limit in COSTLIEST.items():
        ratio = median_ratio(seconds[name], seconds["plain"])
        pair = {key: seconds[key] for key in (name, "plain")}
        report(f"{name} step / plain step, 32 x 32 ViT", pair, ratio=ratio, limit=limit)
        failed |= not promise(
            f"{name} step / plain step", ratio=ratio, at_most=limit, **sides(pair, name, "plain")
        )
    seconds = interleaved(ablated_steps())
    ratio = median_ratio(seconds["mask"], seconds["drop"])
    title = "ablated step, all tokens / kept tokens, ViT-T 224, b=19"
    report(title, seconds, ratio=ratio, limit=FASTER)
    both = sides(seconds, "drop", "mask")
    return int(failed or not promise(title, ratio=ratio, at_least=FASTER, **both))


if __name__ == "__main__":
    sys.exit(main())
