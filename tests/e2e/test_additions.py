"""What CONTRIBUTING.md promises: an attack and an objective are a settings class and one file each.

Both are written into a copy of the project and run through a recipe there, on Ray workers too.
"""

import json
import shutil

import pytest

from tests.e2e.cli import ROOT, TINY, Cli, step_folder, write_recipe

pytestmark = pytest.mark.e2e

ATTACK_SETTINGS = '''
@ATTACKS.register("components.attacks.corners:Corners")
@settings
class CornersSettings(AttackSettings):
    """Random corners of the l-inf ball."""

    count_field = "num_corners"
    norms = ("linf",)

    kind: Literal["corners"] = "corners"
    num_corners: Count = 5

'''

ATTACK = '''
"""Random corners of the l-inf ball."""

import torch

from components.attacks.interface import AttackResult, BudgetedAttack, Items, Search
from components.attacks.losses import margin
from components.attacks.settings import CornersSettings
from components.core.settings import settings
from components.core.types import LogitsFn


@settings
class Corners(BudgetedAttack, CornersSettings):
    """The corners in order; a row leaves at its first misclassified one."""

    @torch.no_grad()
    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        search = Search(logits_of, items)
        for number in range(self.num_corners):
            rows = search.robust_rows
            signs = items.normal(f"corner-{number}").sign()[rows]
            x_adv = (items.x[rows] + self.eps * signs).clamp(0, 1)
            logits = logits_of(x_adv)
            search.visit(rows, x_adv, logits, margin(logits, items.y[rows]))
        return search.result()
'''

OBJECTIVE_SETTINGS = '''
from components.core.settings import NonNegative

@OBJECTIVES.register("components.train.objectives.focal:Focal")
@settings
class FocalSettings(TrainingObjectiveSettings):
    """Cross-entropy with less weight on easy items (Lin et al. 2017, eq. 4)."""

    kind: Literal["focal"] = "focal"
    gamma: NonNegative = 2.0

'''

OBJECTIVE = '''
"""Focal loss (Lin et al. 2017, eq. 4)."""

import torch
from torch import nn
from torch.nn import functional as F

from components.train.objectives.base import Batch, LossOut, Objective
from components.train.objectives.settings import FocalSettings


class Focal(Objective):
    """Cross-entropy weighted by (1 - p)^gamma."""

    settings: FocalSettings

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        logits = wrapped(batch.images)
        losses = F.cross_entropy(
            logits, batch.labels, reduction="none", label_smoothing=self.label_smoothing
        )
        weights = (1 - torch.exp(-losses.detach())) ** self.settings.gamma
        return LossOut((weights * losses).mean(), logits.detach())
'''


@pytest.fixture
def copy(tmp_path):
    """A copy of the project's code."""
    root = tmp_path / "copy"
    for folder in ("components", "pipelines"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, root / folder, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def insert(path, text, *, before):
    """Write `text` before the one line that starts with `before`."""
    old = path.read_text()
    assert old.count(f"\n{before}") == 1
    path.write_text(old.replace(f"\n{before}", f"{text}\n{before}"))


def test_an_attack_and_an_objective_are_a_settings_class_and_a_file_each(copy, tmp_path):
    attacks, objectives = copy / "components/attacks", copy / "components/train/objectives"
    insert(
        attacks / "settings.py",
        ATTACK_SETTINGS,
        before='@ATTACKS.register("components.attacks.aas:',
    )
    (attacks / "corners.py").write_text(ATTACK)
    insert(objectives / "settings.py", OBJECTIVE_SETTINGS, before="class UserObjectiveSettings(")
    (objectives / "focal.py").write_text(OBJECTIVE)
    values = {key: TINY[key] for key in ("name", "seed", "data", "model", "cluster")}
    entries = [{"kind": "corners", "num_corners": 3}, {"kind": "fgsm"}]
    values["train"] = {**TINY["train"], "objective": {"kind": "focal"}, "variants": {}}
    values["attack"] = {"linf": {"eps": 0.05, "attacks": entries, "sanity": None}}
    recipe = write_recipe(tmp_path / "added.yaml", values)
    env = {"PYTHONPATH": str(copy)}
    cli = Cli(root=copy)

    wrong = cli("lint", recipe, "--set", "attack.linf.attacks.0.num_corners=0", env=env)
    assert wrong.code == 2
    assert "attacks.0.num_corners: 0 must be at least 1" in wrong.err.splitlines()[-1]

    storage = tmp_path / "runs"
    result = cli("run", recipe, "--smoke", "--storage", storage, env=env)
    assert result.code == 0, result.err
    summary = json.loads((step_folder(storage, "attack.linf") / "summary.json").read_text())
    assert "corners" in json.dumps(summary)
    model = json.loads((step_folder(storage, "train.main") / "model" / "model.json").read_text())
    assert '"focal"' in json.dumps(model)
