"""Code as a user would write it: network, attack, objective and data source, in two files."""

import json
from pathlib import Path
from typing import Any

from tests.e2e.cli import write_recipe

THINGS = '''
"""A network, an attack, an objective and a data source of one's own."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge
from own_waves import wave
from torch import nn
from torch.nn import functional as F

from components.attacks.interface import Search
from components.core.settings import Positive, Settings, settings
from components.data.sources.base import Entry
from components.train.objectives.base import LossOut, Objective


def build(*, num_classes, channels, image_size, width: int = 8):
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width * (image_size // 2) ** 2, num_classes),
    )


class SignNoise:
    """Random corners of the l-inf ball."""

    @dataclass(frozen=True)
    class Settings:
        num_tries: Annotated[int, Ge(1)] = 5
        corner: Literal["random", "first"] = "random"

    def __init__(self, settings, *, norm, eps):
        self.settings, self.norm, self.eps = settings, norm, eps
        self.name = f"sign-noise-{settings.num_tries}"

    def __call__(self, logits_of, items):
        search = Search(logits_of, items)
        rows = torch.arange(len(items.y))
        for number in range(self.settings.num_tries):
            signs = items.normal(f"try-{number}").sign()
            x_adv = (items.x + self.eps * signs).clamp(0, 1)
            with torch.no_grad():
                logits = logits_of(x_adv)
            left = search.robust_rows
            scores = F.cross_entropy(logits, items.y, reduction="none")
            search.visit(left, x_adv[left], logits[left], scores[left])
        return search.result()


class Focal(Objective):
    """Cross-entropy with less weight on easy items."""

    @settings
    class Settings(Settings):
        gamma: Positive = 2.0

    def __init__(self, settings, *, label_smoothing):
        self.gamma, self.smoothing = settings.gamma, label_smoothing

    def loss(self, wrapped, bare, batch):
        logits = wrapped(batch.images)
        losses = F.cross_entropy(
            logits, batch.labels, reduction="none", label_smoothing=self.smoothing
        )
        weights = (1 - torch.exp(-losses.detach())) ** self.gamma
        return LossOut((weights * losses).mean(), logits.detach())


class Waves:
    """Two classes: light on the left, or on the right."""

    classes = ("left", "right")

    def __init__(self, *, num_items: int = 120):
        self.num_items = num_items

    def entries(self):
        parts = ("train", "train", "train", "val", "test")
        return [
            Entry(f"wave-{i:03d}", i % 2, parts[i // 2 % 5], str(i)) for i in range(self.num_items)
        ]

    def decode(self, entry):
        return wave(int(entry.locator), entry.label)
'''

WAVES = """
import numpy as np

SIDE = 8


def wave(number, label):
    noise = np.random.default_rng(number).integers(0, 90, (SIDE, SIDE, 1))
    light = np.zeros((SIDE, SIDE, 1), np.int64)
    light[:, label * SIDE // 2 : (label + 1) * SIDE // 2] = 150
    return (light + noise).astype(np.uint8)
"""

RECIPE: dict[str, Any] = {
    "name": "own",
    "data": {"source": "python:own_things.py:Waves", "options": {"num_items": 160}},
    "model": {"architecture": "python:own_things.py:build", "options": {"width": 6}},
    "train": {
        "objective": {"kind": "python:own_things.py:Focal", "gamma": 1.5},
        "epochs": 3,
        "batch_size": 16,
        "learning_rate": 0.01,
        "val_items": 8,
        "val_steps": 2,
    },
    "attack": {
        "linf": {
            "eps": "8/255",
            "attacks": [
                {"kind": "python:own_things.py:SignNoise", "num_tries": 3},
                {"kind": "pgd", "num_steps": 3},
            ],
            "sanity": None,
        }
    },
    "certify": {
        "patch": {"kind": "columns", "band": 3, "patch_sizes": [1]},
        "l2": {
            "kind": "gaussian",
            "sigma": 0.1,
            "num_select": 20,
            "num_estimate": 200,
            "block_size": 50,
            "micro_batch": 50,
            "radii": [0.05, 0.1],
            "num_items": 8,
        },
    },
    "cluster": {"num_cpus": 2, "object_store_mb": 128},
}


def write_things(folder: Path, **changes: Any) -> Path:
    """Both files and a recipe that names them; returns the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own_things.py").write_text(THINGS)
    (folder / "own_waves.py").write_text(WAVES)
    return write_recipe(folder / "own.yaml", json.loads(json.dumps(RECIPE)) | changes)
