"""Losses, pixel gradients, and a model that leaves an attack exactly as it entered."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from components.attacks.gradient import sign_ascent
from components.attacks.gradients import attack_mode, input_gradient, is_zero, l2_direction
from components.attacks.losses import cross_entropy, margin


def batch_norm_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 3)
    )
    model.train()
    model[1].eval()  # partly frozen: one module in eval mode, one parameter without gradient
    model[0].bias.requires_grad_(False)
    return model


def state_of(model):
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    return tensors, modes, flags


def assert_same_state(model, before):
    tensors, modes, flags = state_of(model)
    assert all(torch.equal(tensors[name], before[0][name]) for name in before[0])
    assert (modes, flags) == before[1:]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_attack_mode_is_eval_and_frozen_and_restores_every_flag():
    model = batch_norm_model()
    model[1].train()  # its running statistics would drift in train mode
    before = state_of(model)
    x, y = torch.rand(5, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1])
    with attack_mode(model) as attacked:
        assert not any(module.training for module in attacked.modules())
        assert not any(parameter.requires_grad for parameter in attacked.parameters())
        sign_ascent(attacked, x, y, start=x, eps=0.1, step_size=0.1, num_steps=2)
    assert_same_state(model, before)


def test_attack_mode_restores_after_an_exception():
    model = batch_norm_model()
    before = state_of(model)
    with pytest.raises(KeyError), attack_mode(model):
        raise KeyError("inside")
    assert_same_state(model, before)


def test_train_mode_would_have_moved_the_running_statistics():
    """The check above can fail: the same calls without `attack_mode` change the buffers."""
    model = batch_norm_model()
    model[1].train()
    before = model[1].running_mean.clone()
    input_gradient(model, torch.rand(5, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1]))
    assert not torch.equal(model[1].running_mean, before)


@pytest.mark.parametrize("loss_of", [cross_entropy, margin])
def test_input_gradient_matches_finite_differences_and_works_under_no_grad(loss_of):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.rand(2, 1, 2, 3, dtype=torch.float64), torch.tensor([2, 0])
    with torch.no_grad():
        point = input_gradient(model, x, y, loss_of=loss_of)
    assert not point.gradient.requires_grad
    assert torch.equal(point.losses, loss_of(point.logits, y))
    step = 1e-6
    for index in range(6):
        shift = F.one_hot(torch.tensor(index), 6).view(1, 1, 2, 3) * step
        with torch.no_grad():
            slope = (loss_of(model(x + shift), y) - loss_of(model(x - shift), y)) / (2 * step)
        torch.testing.assert_close(point.gradient.flatten(1)[:, index], slope, rtol=1e-6, atol=1e-8)


def test_gradient_of_an_item_does_not_depend_on_the_batch_size():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 3)).double()
    x, y = torch.rand(8, 1, 2, 3, dtype=torch.float64), torch.arange(8) % 3
    alone = torch.cat(
        [input_gradient(model, x[i : i + 1], y[i : i + 1]).gradient for i in range(8)]
    )
    torch.testing.assert_close(input_gradient(model, x, y).gradient, alone, rtol=1e-12, atol=0)


def test_a_gradient_that_is_not_finite_is_an_error():
    x, y = torch.zeros(1, 1, 1, 2), torch.tensor([0])
    with pytest.raises(FloatingPointError):
        input_gradient(lambda z: z.flatten(1).sqrt() - z.flatten(1), x, y)


def test_margin_by_hand_and_by_definition():
    scores = torch.tensor([[1.0, 4.0, 2.0], [1.0, 4.0, 2.0], [5.0, 5.0, 0.0]])
    assert margin(scores, torch.tensor([1, 0, 0])).tolist() == [-2.0, 3.0, 0.0]


def test_l2_direction_has_length_one_even_where_squares_underflow():
    gradient = torch.stack([torch.full((1, 2, 2), v) for v in (3.0, 1e-30, 1e30, 0.0)])
    norms = l2_direction(gradient).flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert is_zero(gradient).tolist() == [False, False, False, True]
