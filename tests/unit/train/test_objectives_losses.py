"""Adversarial losses on a linear model, where every value and gradient can be written down.

The oracles are numpy: z = W x + b, so the gradient of any loss is a sum of dloss/dz times x.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from torch import nn

from components.core.settings import SettingError
from components.train.objectives.adversarial import AdversarialTraining
from components.train.objectives.base import Batch
from components.train.objectives.mart import Mart
from components.train.objectives.settings import (
    FgsmTrainingSettings,
    MartSettings,
    TradesSettings,
)
from components.train.objectives.trades import Trades, both_logits
from components.train.session import initial_model

EPS, BETA = 0.1, 6.0
CORNERS = {"eps": EPS, "num_steps": 2, "step_size": 2 * EPS}  # long steps end in corners


def fgsm(**settings) -> AdversarialTraining:
    return AdversarialTraining(FgsmTrainingSettings(**settings), label_smoothing=0.0)


def trades(**settings) -> Trades:
    return Trades(TradesSettings(**{"num_steps": 1, **settings}), label_smoothing=0.0)


def mart(**settings) -> Mart:
    return Mart(MartSettings(**{"num_steps": 1, **settings}), label_smoothing=0.0)


class Linear(nn.Module):
    """Three classes of flattened 2 x 2 images, in float64."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        weight = 4 * torch.randn(3, 4, generator=generator, dtype=torch.float64)
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(torch.zeros(3).double())

    def forward(self, x):
        return x.flatten(1) @ self.weight.T + self.bias


@pytest.fixture
def linear():
    return Linear().train()


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(4)
    images = 0.2 + 0.6 * torch.rand(5, 1, 2, 2, generator=generator, dtype=torch.float64)
    ids = tuple(f"item-{row}" for row in range(5))
    return Batch(images, torch.tensor([0, 1, 2, 0, 1]), ids, 7, 0, 0)


def given_images(batch: Batch, x_adv: torch.Tensor) -> Batch:
    return replace(batch, adversarial=x_adv)


def moved(batch: Batch) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    noise = torch.rand(batch.images.shape, generator=generator, dtype=torch.float64)
    return batch.images + 0.3 * (noise - 0.5)


def numbers(linear, batch, x_adv):
    """W, x, x', log p, log p', one-hot y as numpy."""
    weight = linear.weight.detach().numpy()
    x, x_adv = (images.flatten(1).numpy() for images in (batch.images, x_adv))
    one_hot = np.eye(3)[batch.labels.numpy()]
    return weight, x, x_adv, log_softmax(x @ weight.T, 1), log_softmax(x_adv @ weight.T, 1), one_hot


def check(out, linear, *, loss, d_clean, d_adv, x, x_adv):
    """Value, and gradient of the mean loss from the gradients by logits of each item."""
    assert out.loss.item() == pytest.approx(loss.mean(), rel=1e-12)
    linear.zero_grad()
    out.loss.backward()
    gradient = (d_clean.T @ x + d_adv.T @ x_adv) / len(x)
    np.testing.assert_allclose(linear.weight.grad.numpy(), gradient, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(linear.bias.grad.numpy(), (d_clean + d_adv).mean(0), atol=1e-12)


def test_adversarial_training_is_the_cross_entropy_of_the_worst_corner(linear, batch):
    """Two classes at work: the gradient's sign is constant, so the worst corner is known."""
    with torch.no_grad():
        linear.weight[2] = 0
        linear.bias[2] = -60.0  # a class that nobody believes in
    batch = Batch(batch.images, batch.labels % 2, batch.item_ids, 7, 0, 0)
    out = fgsm(**CORNERS).loss(linear, linear, batch)
    sign = torch.where(batch.labels == 0, -1.0, 1.0).view(-1, 1, 1, 1).double()
    towards = (linear.weight[0] - linear.weight[1]).sign().view(1, 1, 2, 2).detach()
    worst = batch.images + EPS * sign * towards
    weight, x, x_adv, _, log_q, y = numbers(linear, batch, worst)
    log_q = log_softmax(x_adv @ weight.T + linear.bias.detach().numpy(), 1)
    loss, d_adv = -(y * log_q).sum(1), np.exp(log_q) - y
    check(out, linear, loss=loss, d_clean=0 * d_adv, d_adv=d_adv, x=x, x_adv=x_adv)
    assert torch.equal(out.logits, out.adversarial_logits)


def test_trades_value_and_gradient(linear, batch):
    x_adv = moved(batch)
    out = trades(**CORNERS, beta=BETA).loss(linear, linear, given_images(batch, x_adv))
    _, x, xa, log_p, log_q, y = numbers(linear, batch, x_adv)
    p, q = np.exp(log_p), np.exp(log_q)
    kl = (p * (log_p - log_q)).sum(1)
    check(
        out,
        linear,
        loss=-(y * log_p).sum(1) + BETA * kl,
        d_clean=p - y + BETA * p * (log_p - log_q - kl[:, None]),
        d_adv=BETA * (q - p),
        x=x,
        x_adv=xa,
    )
    assert out.metrics["divergence"] == pytest.approx(kl.mean())


def test_mart_value_and_gradient(linear, batch):
    x_adv = moved(batch)
    out = mart(**CORNERS, beta=BETA).loss(linear, linear, given_images(batch, x_adv))
    _, x, xa, log_p, log_q, y = numbers(linear, batch, x_adv)
    p, q = np.exp(log_p), np.exp(log_q)
    kl, own = (p * (log_p - log_q)).sum(1), (p * y).sum(1)
    rival = np.eye(3)[(q - 2 * y).argmax(1)]  # likeliest wrong class
    q_rival = (q * rival).sum(1)
    open_ = 1.0001 - q_rival + 1e-12
    weight = 1.0000001 - own
    d_kl = p * (log_p - log_q - kl[:, None])
    check(
        out,
        linear,
        loss=-(y * log_q).sum(1) - np.log(open_) + BETA * kl * weight,
        d_clean=BETA * (weight[:, None] * d_kl - (kl * own)[:, None] * (y - p)),
        d_adv=(q - y) + (q_rival / open_)[:, None] * (rival - q) + BETA * weight[:, None] * (q - p),
        x=x,
        x_adv=xa,
    )


@pytest.mark.parametrize("kind", [trades, mart, fgsm])
def test_gradients_by_finite_differences(kind, toy_spec, new_batch):
    """Central differences in float64 through a transformer, both branches at once."""
    model = initial_model(toy_spec, seed=0).double().train()
    batch = new_batch(slice(0, 4))
    batch = Batch(batch.images.double(), batch.labels, batch.item_ids, 7, 0, 0)
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(batch.images.shape, generator=generator).double() - 0.5
    fixed = given_images(batch, (batch.images + 0.2 * noise).clamp(0, 1))
    objective = kind(eps=0.1)
    objective.loss(model, model, fixed).loss.backward()
    for name in ("net.head.weight", "net.blocks.0.attn.qkv.weight", "net.pos_embed"):
        parameter = model.get_parameter(name)
        direction = torch.randn(parameter.shape, generator=generator).double()
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-5 * direction)
                values.append(objective.loss(model, model, fixed).loss.item())
                parameter.sub_(sign * 1e-5 * direction)
        slope = (values[0] - values[1]) / 2e-5
        assert (parameter.grad * direction).sum().item() == pytest.approx(slope, rel=1e-6)


def test_equal_images_leave_the_cross_entropy(linear, batch):
    same = given_images(batch, batch.images.clone())
    out = trades(**CORNERS, beta=BETA).loss(linear, linear, same)
    assert out.metrics["divergence"] == pytest.approx(0, abs=1e-15)
    expected = nn.functional.cross_entropy(linear(batch.images), batch.labels)
    torch.testing.assert_close(out.loss, expected, rtol=1e-14, atol=0)


def test_divergence_of_certain_predictions_has_a_finite_gradient(linear, batch):
    """A probability that underflows to 0 must not turn the gradient into nan."""
    with torch.no_grad():
        linear.weight.mul_(1e4)
    out = trades(**CORNERS, beta=BETA).loss(linear, linear, given_images(batch, moved(batch)))
    out.loss.backward()
    assert linear.weight.grad.isfinite().all()
    assert linear(batch.images).softmax(dim=1).min() == 0


# -- the inner attack


def test_trades_climbs_the_divergence_from_a_point_close_by(linear, batch):
    """One step by hand: the gradient of KL(p || q) at x' is W'(q - p)."""
    objective = trades(eps=EPS, step_size=0.03, start="normal")
    x_adv = objective.craft(linear, batch).flatten(1).numpy()
    again = trades(eps=EPS, step_size=1e-12, start="normal")
    start = again.craft(linear, batch)  # a step of no length shows the start
    spread = (start - batch.images).flatten().numpy()
    assert 0 < np.abs(spread).max() < 0.005  # 0.001 N(0, 1)
    weight, x, x0, log_p, log_q, _ = numbers(linear, batch, start)
    step = 0.03 * np.sign((np.exp(log_q) - np.exp(log_p)) @ weight)
    np.testing.assert_allclose(x_adv, np.clip(x0 + step, x - EPS, x + EPS), atol=1e-9)


def test_soft_targets_can_be_attacked_as_they_are(linear, batch):
    targets = torch.tensor(
        [[0.6, 0.4, 0.0], [0.0, 0.55, 0.45], [0.4, 0, 0.6], [1, 0, 0], [0, 1, 0]]
    )
    mixed = Batch(batch.images, batch.labels, batch.item_ids, 7, 0, 0, targets=targets.double())
    start = fgsm(eps=EPS, step_size=1e-12).craft(linear, batch)
    weight, x, x0, _, log_q, _ = numbers(linear, batch, start)
    shares = {"soft": targets.numpy(), "hard": np.eye(3)[targets.argmax(1).numpy()]}
    for name, share in shares.items():
        x_adv = fgsm(eps=EPS, step_size=0.03, attack_target=name).craft(linear, mixed)
        step = 0.03 * np.sign((np.exp(log_q) - share) @ weight)
        expected = np.clip(x0 + step, x - EPS, x + EPS)
        np.testing.assert_allclose(x_adv.flatten(1).numpy(), expected, atol=1e-9)
    steps = [np.sign((np.exp(log_q) - share) @ weight) for share in shares.values()]
    assert not np.array_equal(*steps)  # otherwise the test tells nothing


def test_published_vector_of_the_epsilon_warmup():
    objective = fgsm(eps=4 / 255, eps_warmup_epochs=10)
    values = [255 * objective.eps_at(epoch) for epoch in (0, 1, 5, 9, 10)]
    assert values == pytest.approx([0, 0.4, 2, 3.6, 4])
    assert objective.eps_at(0) == 0  # exactly: no attack at all


def test_epsilon_can_rise_at_every_step(batch):
    attack = fgsm(eps=EPS, eps_warmup_epochs=2, eps_per="step").attack
    fields = (batch.images, batch.labels, batch.item_ids, 7)
    values = [attack.eps_of(Batch(*fields, e, s, num_steps=4)) for e in (0, 1, 2) for s in (0, 2)]
    assert values == pytest.approx([0, EPS / 4, EPS / 2, 3 * EPS / 4, EPS, EPS])
    with pytest.raises(ValueError, match="number of steps"):
        attack.eps_of(batch)


@pytest.mark.parametrize(("rule", "length"), [("fixed", 0.02), ("proportional", 0.01)])
def test_step_length_during_a_warmup(linear, batch, rule, length):
    batch = Batch(batch.images, batch.labels, batch.item_ids, 7, 1, 0)  # half way: eps 0.05

    def crafted(step_size: float) -> torch.Tensor:
        objective = fgsm(
            eps=EPS, step_size=step_size, step_rule=rule, eps_warmup_epochs=2, start="normal"
        )
        return objective.craft(linear, batch)

    moved_by = (crafted(0.02) - crafted(1e-12)).abs()
    torch.testing.assert_close(moved_by, torch.full_like(moved_by, length), rtol=1e-6, atol=0)


def test_without_a_budget_there_is_no_attack(linear, batch):
    class Forbidden(nn.Module):
        def forward(self, x):
            pytest.fail("the model was asked")

    attack = {"eps": EPS, "eps_warmup_epochs": 1}
    for objective in (fgsm(**attack), trades(**attack), mart(**attack)):
        assert objective.craft(Forbidden(), batch) is batch.images
    dropout = nn.Sequential(nn.Dropout(0.5), linear)
    out = trades(**attack).loss(dropout, dropout, batch)
    assert "divergence" not in out.metrics  # of two dropout masks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps": 8}, r"eps: 8 is outside \(0, 1\]"),
        ({"eps": 0.1, "num_steps": 0}, r"num_steps: 0 must be at least 1"),
        ({"eps": 0.1, "start": "zero"}, r"start: zero is unknown; choose one of uniform, normal"),
        ({"eps": 0.1, "step_rule": "auto"}, r"step_rule: auto is unknown"),
        ({"eps": 0.1, "step_size": 0.0}, r"step_size: 0\.0"),
    ],
)
def test_mistakes_are_named(settings, message):
    with pytest.raises(SettingError, match=message):
        fgsm(**settings)


# -- batch normalisation


class Normalised(nn.Module):
    """Batch statistics in front of a linear map; remembers the batches it saw in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.seen: list[int] = []

    def forward(self, x):
        if self.training:
            self.seen.append(len(x))
        return self.head(self.norm(x.flatten(1)))


@pytest.fixture
def normalised(batch):
    torch.manual_seed(0)
    return Normalised().double().train()


def test_networks_with_batch_statistics_get_separate_passes(normalised, linear, batch):
    x, x_adv = batch.images, moved(batch)
    logits, adversarial = both_logits(normalised, normalised, x, x_adv, passes="auto")
    assert normalised.seen == [5, 5]
    reference = Normalised().double().train()
    reference.load_state_dict(
        {**normalised.state_dict(), **Normalised().norm.state_dict()}, strict=False
    )
    torch.testing.assert_close(logits, normalised.head(reference.norm(x.flatten(1))))
    torch.testing.assert_close(adversarial, normalised.head(reference.norm(x_adv.flatten(1))))
    mixed, _ = both_logits(normalised, normalised, x, x_adv, passes="joint")
    assert normalised.seen == [5, 5, 10]
    assert not torch.allclose(mixed, logits)
    for passes in ("joint", "separate", "auto"):
        pair = both_logits(linear, linear, x, x_adv, passes=passes)
        torch.testing.assert_close(pair, (linear(x), linear(x_adv)))


@pytest.mark.parametrize(
    ("clean_forward", "passes"), [("none", [5]), ("no_grad_eval", [5]), ("train_stats", [5, 5])]
)
def test_clean_images_reach_running_statistics_only_on_request(
    normalised, batch, clean_forward, passes
):
    objective = fgsm(eps=EPS, clean_forward=clean_forward)
    out = objective.loss(normalised, normalised, batch)
    assert normalised.seen == passes
    assert int(normalised.norm.num_batches_tracked) == len(passes)
    assert ("clean_accuracy" in out.metrics) == (clean_forward != "none")
    again = objective.loss(
        normalised, normalised, Batch(batch.images, batch.labels, batch.item_ids, 7, 0, 3)
    )
    assert ("leak" in again.metrics) == (clean_forward == "train_stats")  # not at every step
