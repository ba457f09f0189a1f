"""What the gate accepts is run to its end: no stage refuses it for a reason known before."""

import random
from pathlib import Path

import pytest
import yaml

from components.core.errors import CasemateError
from components.core.user_code import pinned, reading
from components.models.checkpoint import save_model
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from pipelines.flow import run as flow
from pipelines.recipe.check import check
from pipelines.recipe.load import loads, parse, shrink
from pipelines.recipe.schema.recipe import Recipe

pytestmark = pytest.mark.ray

SMALL = """\
name: held
data: {source: digits, limits: {train: 64, val: 16, test: 8}}
model: {token_policy: drop, options: {patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}}
train:
  objective: {kind: columns, band: 8}
  epochs: 1
  batch_size: 16
certify:
  p: {kind: columns, patch_sizes: [8], stride: 8}
  l2: {kind: gaussian, sigma: 1, num_select: 1, num_estimate: 20, failure_prob: 0.01, num_items: 1}
cluster: {num_cpus: 2}
"""
ATTACKED = """\
name: attacked
data: {source: digits, limits: {train: 64, val: 16, test: 8}}
model: {architecture: tiny_xcit, options: {patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}}
train: {objective: {kind: trades, eps: 0.1, num_steps: 1}, epochs: 1, batch_size: 16}
attack: {l: {eps: 0.1, attacks: [{kind: pgd, num_steps: 2}], sanity: null}}
certify: {p: {kind: blocks, band: 2, patch_sizes: [1], stride: 4}}
cluster: {num_cpus: 2}
"""
DENOISED = """\
name: denoised
data: {source: digits, limits: {train: 64, val: 16, test: 8}}
model: {options: {patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}}
train:
  variants:
    d:
      objective: {kind: denoiser, range: [0, 1], num_timesteps: 100}
      model: {architecture: tiny_unet, options: {widths: [8, 16]}}
  epochs: 1
  batch_size: 16
certify:
  l2: {kind: gaussian, sigma: 0.5, denoiser: d, num_select: 8, num_estimate: 32, num_items: 2}
cluster: {num_cpus: 2}
"""
# Values that are often wrong, and sometimes are not.
VALUES = (1, 2, 3, 4, 8, 0.1, 0.5, 1.5, True, None, "mask", "drop", "rows", "linear", [1], [2, 8])
KEPT = (
    "name",
    "storage",
    "tracking",
    "cluster",
    "report",
    "data.limits",
    "data.source",
    "data.path",
)


def _places(values: dict, path: tuple = ()):
    for key, value in values.items():
        if not ".".join((*path, key)).startswith(KEPT):
            if isinstance(value, dict):
                yield from _places(value, (*path, key))
            else:
                yield (*path, key)


def accepted_mutation(text: str, rng: random.Random) -> Recipe:
    """The recipe in smoke size with three values changed, each so that the gate accepts it."""
    values = loads(text, source="my.yaml").resolved()
    changed = 0
    while changed < 3:
        trial = yaml.safe_load(yaml.safe_dump(values))
        *above, key = rng.choice(list(_places(trial)))
        place = trial
        for part in above:
            place = place[part]
        before, place[key] = place[key], rng.choice(VALUES)
        try:
            recipe = shrink(parse(trial, source="my.yaml"))
            check(recipe)
        except CasemateError:
            continue
        if place[key] != before:
            values, changed = trial, changed + 1
    return recipe


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(ATTACKED, id="attacked"),
        pytest.param(SMALL, id="small", marks=pytest.mark.cluster),
        pytest.param(DENOISED, id="denoised", marks=pytest.mark.cluster),
    ],
)
def test_accepted_mutations_run_to_their_end(text: str, tmp_path: Path, ray_session):
    recipe = accepted_mutation(text, random.Random(f"{text}0"))
    steps = flow.run_flow(recipe, storage=tmp_path)
    assert all(step.finished for step in steps)


@pytest.mark.cluster
def test_what_the_gate_accepts_runs_to_its_end(tmp_path, ray_session):
    """Lengths as long as the images, one draw to select, a batch of one worker."""
    recipe = loads(SMALL, source="held.yaml")
    check(recipe)
    steps = flow.run_flow(recipe, storage=tmp_path, until="certify")
    assert all(step.finished for step in steps)


MIXING = """
import torch
from torch import nn


class Rescaled(nn.Module):
    def forward(self, x):
        return x / x.amax()  # of the whole batch


def build(*, num_classes, channels, image_size):
    torch.manual_seed(0)
    pixels = channels * image_size**2
    return nn.Sequential(Rescaled(), nn.Flatten(), nn.Linear(pixels, num_classes))
"""


def test_a_network_that_mixes_images_is_refused_by_the_attack_stage(tmp_path, ray_session):
    """Only its outputs show it: the gate does not know, the workers do, in one line."""
    (tmp_path / "mixing.py").write_text(MIXING)
    with reading(base=tmp_path, trusted=True):
        spec = ModelSpec(
            architecture=pinned("python:mixing.py:build", field="architecture"),
            **{"num_classes": 10, "channels": 1, "image_size": 8, "mean": (0.0,), "std": (1.0,)},
        )
        save_model(tmp_path / "given", PixelModel(spec).eval(), recipe_digest="")
    values = {"name": "mixed", "model": {"pretrained": str(tmp_path / "given")}}
    values |= {key: yaml.safe_load(ATTACKED)[key] for key in ("data", "attack", "cluster")}
    recipe = loads(yaml.safe_dump(values), source="mixed.yaml")
    check(recipe)
    with pytest.raises(CasemateError) as caught:
        flow.run_flow(recipe, storage=tmp_path / "runs", until="attack")
    (line,) = str(caught.value).splitlines()
    assert line.startswith("mixed.yaml: model: main gives an image other logits beside bright im")
