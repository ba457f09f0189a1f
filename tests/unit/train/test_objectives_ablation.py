"""Ablation training: what stays visible, and that dropped tokens change no logit."""

import pytest
import torch

from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.models.spec import ModelSpec
from components.train.objectives.ablation import AblationTraining, ablated_logits
from components.train.objectives.settings import AblationTrainingSettings
from components.train.session import initial_model


def ablation(**settings) -> AblationTraining:
    return AblationTraining(AblationTrainingSettings(**settings), label_smoothing=0.0)


def runs_cyclically(line: torch.Tensor, length: int) -> bool:
    """Whether True stands on exactly one cyclic run of this length."""
    places = [(start + i) % len(line) for start in range(len(line)) for i in range(length)]
    candidates = torch.tensor(places).view(len(line), length)
    wanted = torch.zeros(len(line), len(line), dtype=torch.bool).scatter(1, candidates, True)
    return bool((wanted == line).all(dim=1).any())


@pytest.mark.parametrize("position", ["batch", "image"])
@pytest.mark.parametrize("shape", ["column", "row", "block"])
def test_visible_pixels_are_one_cyclic_band_or_square(new_batch, shape, position):
    objective = ablation(size=3, shape=shape, position=position)
    masks = torch.cat(
        [objective.visible(new_batch(step=s, epoch=s)).view(-1, 8, 8) for s in range(9)]
    )
    for mask in masks:
        rows, columns = mask.any(dim=1), mask.any(dim=0)
        assert torch.equal(mask, rows[:, None] & columns)
        assert runs_cyclically(rows, 8 if shape == "column" else 3)
        assert runs_cyclically(columns, 8 if shape == "row" else 3)
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) > 4


def test_images_have_positions_of_their_own(new_batch):
    objective = ablation(size=3, shape="row", position="image")
    whole = objective.visible(new_batch(step=1))
    assert len({tuple(mask[:, 0].tolist()) for mask in whole}) > 4
    assert torch.equal(objective.visible(new_batch(slice(4, 9), step=2)), whole[4:9])
    assert not torch.equal(objective.visible(new_batch(epoch=1)), whole)


@pytest.mark.parametrize("shape", ["column", "row", "block"])
def test_groups_of_equal_tokens_are_one_image_at_a_time(toy_spec, new_batch, shape):
    model = initial_model(toy_spec, seed=0).eval()
    batch = new_batch()
    visible = ablation(size=3, shape=shape, position="image").visible(batch)
    assert len(model.num_kept(visible).unique()) > 1
    logits = ablated_logits(model, model, batch, visible)
    for row, mask in enumerate(visible):
        alone = model(batch.images[row : row + 1], mask)
        torch.testing.assert_close(logits[row : row + 1], alone)


def test_gradients_of_all_groups_meet(toy_spec, new_batch):
    model, batch = initial_model(toy_spec, seed=0).train(), new_batch()
    objective = ablation(size=3, position="image")
    objective.loss(model, model, batch).loss.backward()
    total = torch.zeros_like(model.net.head.weight)
    for row in range(len(batch.images)):
        alone = objective.loss(model, model, new_batch(slice(row, row + 1))).loss
        total += torch.autograd.grad(alone, model.net.head.weight)[0] / len(batch.images)
    torch.testing.assert_close(model.net.head.weight.grad, total)


def test_masking_models_make_one_pass(toy_spec, new_batch):
    spec = ModelSpec("tiny_vit", 2, 1, 8, (0.5,), (0.5,), options=toy_spec.options)
    model, calls = initial_model(spec, seed=0), []
    model.register_forward_hook(lambda *_: calls.append(1))
    ablation(size=3, position="image").loss(model, model, new_batch())
    assert len(calls) == 1


def test_a_band_wider_than_the_image(new_batch):
    with pytest.raises(CasemateError, match=r"train\.objective\.size: 9 is wider than .* 8x8"):
        ablation(size=9, shape="block").visible(new_batch())
    with pytest.raises(SettingError, match=r"shape: square is unknown"):
        ablation(size=3, shape="square")
