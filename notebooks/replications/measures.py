"""Counts on test items: for each measure, how many of how many are correct.

Counts are stored, shares are derived from them. An arm's test items, and all random numbers of the
attacks, are those of every other arm of the same seed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from components.attacks.aas import ScaledAttack
from components.attacks.apgd import Apgd
from components.attacks.gradient import Pgd
from components.attacks.gradients import attack_mode
from components.attacks.interface import Attack, AttackResult, Items
from components.attacks.scales import ScaleSearch
from components.certify.patch.rules import certify
from components.data.ablation import Ablations
from components.data.prepared import ImageSplit, PreparedDataset
from components.models.pixels import PixelModel
from components.models.voting import column_predictions
from notebooks.replications.arms import EPS, Size

Counts = dict[str, Any]  # name -> [right, all], and lists of such pairs
BATCH = 250


def robustness(model: PixelModel, dataset: PreparedDataset, size: Size, *, seed: int) -> Counts:
    """Clean accuracy, and that under APGD-CE at the full epsilon."""
    attack = Apgd(norm="linf", eps=EPS, num_steps=size.apgd_steps)
    results = _attacked(model, dataset.load("test"), attack, seed=seed)
    return {
        "clean": _count([r.clean_prediction == y for r, y in results]),
        "apgd-ce": _count([_robust(r, y) for r, y in results]),
    }


def ablations(model: PixelModel, dataset: PreparedDataset, size: Size, *, seed: int) -> Counts:
    """Single votes, the vote of all bands, and the votes that no patch can change.

    Salman et al. 2022, sec. 2; the rule of `certify` that sees counts only.
    """
    test, width = dataset.load("test"), dataset.width
    model.eval()
    votes = column_predictions(
        model, test.pixels(), band=size.band, stride=1, micro_batch=width
    ).numpy()
    labels = test.labels.numpy()
    claims = certify(
        votes,
        Ablations(kind="columns", image_size=(dataset.height, width), band=size.band, stride=1),
        num_classes=len(dataset.classes),
        patch_sizes=size.patch_sizes,
    )
    right = claims.prediction == labels
    counts = {
        "single ablations": _count([torch.from_numpy(votes == labels[:, None])]),
        "vote": _count([torch.from_numpy(right)]),
    }
    for column, patch in enumerate(size.patch_sizes):
        certified = torch.from_numpy(right & claims.certified[:, column])
        counts[f"certified, {patch}x{patch}"] = _count([certified])
    return counts


def attention(model: PixelModel, dataset: PreparedDataset, size: Size, *, seed: int) -> Counts:
    """PGD, PGD with attention scales, and equally many restarts, all evaluated by the model itself.

    `paper_protocol` holds the accuracies of the rescaled networks, one entry per draw of scales: other
    classifiers than the model, and the figures that Jain & Dutta print. Scales are searched on
    validation items (their Algorithm 1).
    """
    test, reference = dataset.load("test"), dataset.load("val", limit=256)
    inner = Pgd(norm="linf", eps=EPS, num_steps=size.pgd_steps)
    with attack_mode(model):
        scales = ScaleSearch()(model, model.net, _items(reference, seed=seed))
        scaled = ScaledAttack(net=model.net, inner=inner, scales=scales, surrogate="network")
        reports = [(scaled.examine(model, items), items.y) for items in _batches(test, seed=seed)]
    restarts = _attacked(model, test, scaled.restarts(), seed=seed)
    plain, *rescaled = zip(*(report.paper_protocol for report, _ in reports), strict=True)
    return {
        **robustness(model, dataset, size, seed=seed),
        "pgd": _count([network.original_correct for network in plain]),
        "pgd + restarts": _count([_robust(r, y) for r, y in restarts]),
        "pgd + aas": _count([_robust(report.result, y) for report, y in reports]),
        "paper_protocol": [
            {
                "clean": _count([network.scaled_clean_correct for network in networks]),
                "pgd + aas": _count([network.scaled_correct for network in networks]),
                "scales": list(networks[0].scales),
            }
            for networks in rescaled
        ],
    }


MEASURES: Mapping[str, Callable[..., Counts]] = {
    "robustness": robustness,
    "ablations": ablations,
    "attention": attention,
}


def _attacked(
    model: PixelModel, test: ImageSplit, attack: Attack, *, seed: int
) -> list[tuple[AttackResult, Tensor]]:
    with attack_mode(model):
        return [(attack(model, items), items.y) for items in _batches(test, seed=seed)]


def _batches(split: ImageSplit, *, seed: int) -> list[Items]:
    spans = range(0, len(split), BATCH)
    return [_items(split.span(start, start + BATCH), seed=seed) for start in spans]


def _items(split: ImageSplit, *, seed: int) -> Items:
    return Items(split.pixels(), split.labels, split.item_ids, run_seed=seed)


def _robust(result: AttackResult, y: Tensor) -> Tensor:
    return (result.clean_prediction == y) & (result.adversarial_prediction == y)


def _count(right: list[Tensor]) -> list[int]:
    return [sum(int(part.sum()) for part in right), sum(part.numel() for part in right)]
