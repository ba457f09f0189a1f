"""`make bench`: our PGD-20 and APGD-CE against torchattacks', on the same network and items.

The demo's network is trained on the demo's digits, and the budget is set so that PGD-20 breaks
about half of the items. Both sides then attack the same items, in turns, in one process; ratios are
taken round by round and their median is compared with the limit.

Per gradient, nothing may break, so both sides do the same work: a clean prediction, 20 gradients, a
final prediction. In whole attacks torchattacks gets its own savings: restarts of PGD through its
`MultiAttack` and those of APGD both leave out items that an earlier restart has broken. Ours drops
them in the middle of a run. With more restarts both sides spend their time on the robust items,
which cannot be left out, and the ratio falls towards that of a gradient. Robust accuracies are
printed beside the times: neither side may trade strength for speed.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torchattacks
from torch import nn

from components.attacks.apgd import Apgd
from components.attacks.gradient import Pgd
from components.attacks.gradients import attack_mode
from components.attacks.interface import Attack, Items
from components.models.fast import fast_forward
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from components.train.epoch import EpochPlan, train_epoch
from components.train.feed import Worker
from components.train.objectives.make import make_objective
from components.train.objectives.settings import FgsmTrainingSettings
from components.train.session import initial_model
from components.train.settings import TrainSettings
from pipelines.recipe import load as recipes
from tests.benchmarks.input import demo_digits
from tests.benchmarks.table import clock, device, promise

NUM_EPOCHS = 4
NUM_ITEMS = 64
NUM_RESTARTS = 3
SLOWEST = 1.0  # time of a gradient, ours / theirs
FASTER = 1.3  # wall time, theirs / ours
SAME = 0.01  # robust accuracies may differ by one item in a hundred


@dataclass(frozen=True, slots=True)
class Contest:
    """One attack on both sides, with equal settings."""

    title: str
    ours: Attack
    theirs: Callable[[nn.Module], torchattacks.attack.Attack]


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    robust_accuracy: float


def trained_network() -> tuple[PixelModel, Items]:
    """The demo's network after some adversarial epochs, and digits that it classifies rightly."""
    data = demo_digits(2500)
    options = recipes.load("demo").model.options
    spec = ModelSpec("tiny_vit", 10, 1, 32, (0.5,), (0.5,), options=options)
    model = initial_model(spec, seed=0).to(device())
    plan = EpochPlan(TrainSettings(batch_size=64), seed=0, epochs=NUM_EPOCHS, image_size=32)
    objective = make_objective(FgsmTrainingSettings(eps=0.05), label_smoothing=0.0)
    updater = plan.updater(model)
    for epoch in range(NUM_EPOCHS):
        train_epoch(
            model, model, data, objective, updater, plan=plan, epoch=epoch, worker=Worker(),
        )  # fmt: skip
    split = data.real
    x, y = split.pixels().to(device()), split.labels.to(device())
    with attack_mode(model), torch.no_grad():
        right = (model(x).argmax(dim=1) == y).nonzero().squeeze(1)[:NUM_ITEMS]
    return model, Items(x, y, split.item_ids, run_seed=0).take(right)


def budget_that_breaks_half(model: PixelModel, items: Items) -> float:
    """Bisection on eps: PGD-20 is monotone enough, and one item in ten does not matter."""
    low, high = 0.0, 0.5
    for _ in range(6):
        eps = (low + high) / 2
        result = Pgd(norm="linf", eps=eps)(model, items)
        standing = (result.adversarial_prediction == items.y).double().mean()
        low, high = (eps, high) if standing > 0.5 else (low, eps)
    return eps


def contests(eps: float) -> list[Contest]:
    step = {"eps": eps, "alpha": eps / 4, "steps": 20}
    return [
        Contest("pgd-20", Pgd(norm="linf", eps=eps), lambda m: torchattacks.PGD(m, **step)),
        Contest(
            f"pgd-20, {NUM_RESTARTS} restarts",
            Pgd(norm="linf", eps=eps, num_restarts=NUM_RESTARTS),
            lambda m: torchattacks.MultiAttack(
                [torchattacks.PGD(m, **step) for _ in range(NUM_RESTARTS)]
            ),
        ),
        Contest(
            f"apgd-ce, {NUM_RESTARTS} restarts",
            Apgd(norm="linf", eps=eps, num_restarts=NUM_RESTARTS),
            lambda m: torchattacks.APGD(m, eps=eps, steps=100, n_restarts=NUM_RESTARTS),
        ),
    ]


def run_ours(contest: Contest, model: PixelModel, items: Items) -> Run:
    began = clock()
    with attack_mode(model), fast_forward(model.net):  # as the attack stage does
        result = contest.ours(model, items)
    seconds = clock() - began
    return Run(seconds, float((result.adversarial_prediction == items.y).double().mean()))


def run_theirs(contest: Contest, model: PixelModel, items: Items) -> Run:
    """As its users call it; the final prediction tells which items stand."""
    began = clock()
    with torch.no_grad():
        clean = model(items.x).argmax(dim=1) == items.y
    x_adv = contest.theirs(model)(items.x, items.y)
    with torch.no_grad():
        standing = clean & (model(x_adv).argmax(dim=1) == items.y)
    seconds = clock() - began
    return Run(seconds, float(standing.double().mean()))


def interleaved(
    contest: Contest, model: PixelModel, items: Items, *, num_rounds: int
) -> list[tuple[Run, Run]]:
    """(ours, theirs) per round; each round has starts of its own."""
    rounds = []
    for seed in range(num_rounds):
        torch.manual_seed(seed)
        theirs = run_theirs(contest, model, items)
        rounds.append((run_ours(contest, model, replace(items, run_seed=seed)), theirs))
    return rounds


def report(title: str, rounds: list[tuple[Run, Run]], **verdict: float) -> None:
    print(json.dumps({
        "benchmark": title,
        "seconds": [[round(run.seconds, 3) for run in pair] for pair in rounds],
        "robust_accuracy": [round(statistics.mean(side), 3) for side in accuracies(rounds)],
        **{key: round(value, 3) for key, value in verdict.items()},
    }))  # fmt: skip


def sides(rounds: list[tuple[Run, Run]]) -> dict[str, str]:
    """Median seconds of both sides, for the table."""
    ours, theirs = (statistics.median(pair[side].seconds for pair in rounds) for side in (0, 1))
    return {"peer": f"torchattacks {theirs:.2f} s", "ours": f"{ours:.2f} s"}


def accuracies(rounds: list[tuple[Run, Run]]) -> list[list[float]]:
    return [[pair[side].robust_accuracy for pair in rounds] for side in (0, 1)]


def main() -> int:
    torch.set_num_threads(1)
    model, items = trained_network()
    model.eval()
    with attack_mode(model):
        eps = budget_that_breaks_half(model, items)
    failed = False
    calm = Contest("", Pgd(norm="linf", eps=1e-4), lambda m: torchattacks.PGD(m, 1e-4, 2.5e-5, 20))
    rounds = interleaved(calm, model, items, num_rounds=8)[1:]  # the first one warms up
    slower = statistics.median(ours.seconds / theirs.seconds for ours, theirs in rounds)
    report("pgd-20 per gradient, ours / theirs", rounds, median_ratio=slower, limit=SLOWEST)
    failed |= not promise(
        "a gradient of pgd-20, ours / theirs", ratio=slower, at_most=SLOWEST, **sides(rounds)
    )
    for contest in contests(eps):
        rounds = interleaved(contest, model, items, num_rounds=3)
        faster = statistics.median(theirs.seconds / ours.seconds for ours, theirs in rounds)
        report(
            f"{contest.title}, theirs / ours", rounds, eps=eps, median_ratio=faster, limit=FASTER
        )
        ours, theirs = map(statistics.mean, accuracies(rounds))
        failed |= not promise(
            f"{contest.title}, theirs / ours",
            ratio=faster,
            at_least=FASTER,
            kept=ours <= theirs + SAME,
            **sides(rounds),
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
