"""What the gate accepts is run to its end: no stage refuses it for a reason known before."""

import pytest

from pipelines.flow import run as flow
from pipelines.recipe.check import check
from pipelines.recipe.load import loads

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


def test_what_the_gate_accepts_runs_to_its_end(tmp_path):
    """Lengths as long as the images, one draw to select, a batch of one worker."""
    recipe = loads(SMALL, source="held.yaml")
    check(recipe)
    steps = flow.run_flow(recipe, storage=tmp_path, until="certify")
    assert all(step.finished for step in steps)
