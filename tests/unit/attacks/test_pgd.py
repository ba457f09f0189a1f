"""The evaluation attack against exact answers, and its promises per item."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from components.attacks.gradient import in_fixed_batches, pgd_l2, pgd_linf
from components.attacks.losses import cross_entropy, margin
from components.attacks.starts import random_starts
from tests.unit.attacks.problems import random_problem

SHAPE = (1, 3, 3)
ATTACKS = [pgd_linf, pgd_l2]


def row_wise_linear(weight):
    """A linear model whose rows are summed one by one: bit-equal whatever shares the batch."""
    return lambda x: torch.stack([(row[None] * weight).flatten(1).sum(1) for row in x])


def problem(seed, *, num_classes=3, **options):
    return random_problem(seed, row_wise_linear, shape=SHAPE, num_classes=num_classes, **options)


def starts_for(ids, *, run_seed=0):
    return random_starts(ids, SHAPE, run_seed=run_seed, stream="pgd")


IDS = [f"item-{i}" for i in range(6)]


@pytest.mark.parametrize("attack", ATTACKS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), eps=st.floats(0.001, 0.6), num_steps=st.integers(1, 5))
def test_promises_hold_for_every_row(attack, seed, eps, num_steps):
    logits_of, x, y = problem(seed)
    kept = x.clone()
    budget = {"eps": eps, "step_size": eps / 2, "num_steps": num_steps}
    result = attack(logits_of, x, y, **budget, starts=starts_for(IDS))
    assert torch.equal(x, kept)
    assert 0 <= result.x_adv.min() <= result.x_adv.max() <= 1
    for delta in (result.x_adv - x, result.x_adv.double() - x.double()):
        size = delta.flatten(1)
        reach = size.abs().amax(dim=1) if attack is pgd_linf else size.norm(dim=1)
        assert (reach.double() <= eps).all()
    # predictions are those of the returned points; loss never falls below the clean loss
    assert torch.equal(result.clean_prediction, logits_of(x).argmax(dim=1))
    assert torch.equal(result.adversarial_prediction, logits_of(result.x_adv).argmax(dim=1))
    stands = result.adversarial_prediction == y
    clean, attacked = cross_entropy(logits_of(x), y), cross_entropy(logits_of(result.x_adv), y)
    assert (attacked >= clean)[stands].all()
    # wrong from the beginning: untouched, one evaluation
    assert torch.equal(result.x_adv[0], x[0])
    assert result.num_evaluations[0] == 1
    assert (result.num_evaluations <= num_steps + 2).all()
    assert (result.num_evaluations[stands] == num_steps + 2).all()


@pytest.mark.parametrize("attack", ATTACKS)
def test_zero_budget_is_an_exact_no_op(attack):
    logits_of, x, y = problem(1)
    result = attack(logits_of, x, y, eps=0.0, step_size=0.1, num_steps=5, starts=starts_for(IDS))
    assert torch.equal(result.x_adv, x)
    assert torch.equal(result.adversarial_prediction, result.clean_prediction)
    assert result.num_evaluations.tolist() == [1] * 6


@pytest.mark.parametrize("attack", ATTACKS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), order=st.permutations(range(6)), size=st.integers(1, 6))
def test_results_depend_on_the_item_and_not_on_its_batch(attack, seed, order, size):
    logits_of, x, y = problem(seed)
    budget = {"eps": 0.1, "step_size": 0.03, "num_steps": 4}
    whole = attack(logits_of, x, y, **budget, starts=starts_for(IDS))
    for first in range(0, 6, size):
        rows = torch.tensor(order[first : first + size])
        part = attack(
            logits_of, x[rows], y[rows], **budget, starts=starts_for([IDS[i] for i in rows])
        )
        assert torch.equal(part.x_adv, whole.x_adv[rows])
        assert torch.equal(part.adversarial_prediction, whole.adversarial_prediction[rows])
        assert torch.equal(part.num_evaluations, whole.num_evaluations[rows])


def test_fixed_batches_give_matrix_products_the_same_bits_in_any_batch():
    """Float32 products round by shape; behind a fixed shape a network's items are bit-equal."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 64), nn.GELU(), nn.Linear(64, 3))
    shapes = []

    def spy(z):
        shapes.append(len(z))
        return model(z)

    x, ids = torch.rand(23, *SHAPE), [str(i) for i in range(23)]
    y = model(x).argmax(dim=1)
    budget = {"eps": 0.1, "step_size": 0.03, "num_steps": 5}
    logits_of = in_fixed_batches(spy, size=8)
    torch.testing.assert_close(logits_of(x), model(x))
    whole = pgd_linf(logits_of, x, y, **budget, starts=starts_for(ids))
    for rows in torch.randperm(23).split(5):
        part = pgd_linf(
            logits_of, x[rows], y[rows], **budget, starts=starts_for([ids[i] for i in rows])
        )
        assert torch.equal(part.x_adv, whole.x_adv[rows])
    assert set(shapes) == {8}


def test_starts_are_uniform_and_addressed_by_seed_stream_and_item():
    first = starts_for(IDS)
    assert torch.equal(first, starts_for(IDS))
    assert torch.equal(first[[4, 2]], starts_for([IDS[4], IDS[2]]))
    assert not torch.equal(first, starts_for(IDS, run_seed=1))
    assert not torch.equal(first, random_starts(IDS, SHAPE, run_seed=0, stream="other"))
    assert len({tuple(row.flatten().tolist()) for row in first}) == 6
    many = random_starts(["a"], (50, 50), run_seed=0, stream="pgd")
    assert -1 <= many.min() < -0.99
    assert 0.99 < many.max() <= 1
    assert many.mean().abs() < 0.06  # five standard errors of 2,500 uniforms


@pytest.mark.parametrize(("attack", "dual_norm", "num_steps"), [(pgd_linf, 1, 2), (pgd_l2, 2, 20)])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), eps=st.floats(0.01, 0.24))
def test_a_linear_model_breaks_as_in_the_closed_form(attack, dual_norm, num_steps, seed, eps):
    """Two classes, pixels away from the edges: breakable iff |z_y - z_j| < eps * |w_y - w_j|_q."""
    logits_of, x, y = problem(seed, num_items=20, num_classes=2, low=0.25, high=0.75)
    ids = [str(i) for i in range(20)]
    budget = {"eps": eps, "step_size": eps, "num_steps": num_steps}
    result = attack(logits_of, x, y, **budget, starts=starts_for(ids))
    basis = logits_of(torch.eye(9).view(9, *SHAPE))  # column j: weights of class j
    length = (basis[:, 0] - basis[:, 1]).norm(p=dual_norm)
    slack = margin(logits_of(x), y) + eps * length
    # l-inf: float32 rounding of sums of 9 products; l2: steps approach the pole geometrically
    clear = slack.abs() > (1e-5 if attack is pgd_linf else 1e-3 * eps * length)
    assert torch.equal((result.adversarial_prediction != y)[clear], (slack > 0)[clear])


def test_pgd_beats_random_noise_on_a_trained_network():
    torch.manual_seed(0)
    centres = torch.rand(3, *SHAPE)
    y = torch.arange(90) % 3
    x = (centres[y] + 0.1 * torch.randn(90, *SHAPE)).clamp(0, 1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(120):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    correct = model(x).argmax(dim=1) == y
    assert correct.float().mean() > 0.9
    eps, ids = 0.2, [str(i) for i in range(90)]
    stands_noise = correct.clone()
    for draw in range(12):  # as many points as PGD visits
        noise = random_starts(ids, SHAPE, run_seed=draw, stream="noise")
        stands_noise &= model((x + eps * noise).clamp(0, 1)).argmax(dim=1) == y
    budget = {"eps": eps, "step_size": eps / 4, "num_steps": 10}
    for loss_of in (cross_entropy, margin):
        result = pgd_linf(model, x, y, **budget, starts=starts_for(ids), loss_of=loss_of)
        stands = result.adversarial_prediction == y
        assert stands.float().mean() < stands_noise.float().mean() - 0.2
        assert not (stands & ~correct).any()


def test_a_blind_attack_is_flagged():
    """Items behind a dead unit get no gradient; the flag says that survival proves nothing."""
    x = torch.full((2, *SHAPE), 0.5)
    x[1] = 1.0

    def half_dead(z):
        total = z.flatten(1).sum(dim=1)
        return torch.stack([5 - F.relu(total - 7), torch.zeros_like(total)], dim=1)

    y = torch.zeros(2, dtype=torch.int64)
    budget = {"eps": 0.01, "step_size": 0.01, "num_steps": 3}
    result = pgd_linf(half_dead, x, y, **budget, starts=starts_for(IDS[:2]))
    assert (result.num_zero_gradients > 0).tolist() == [True, False]


def test_a_success_is_kept_although_later_steps_would_lose_it():
    """The loss here falls beyond a narrow window of mistakes; the last iterate is right again."""
    seen = []

    def window(z):
        mean = z.flatten(1).mean(dim=1)
        seen.append(mean[0].detach().item())
        wrong = ((mean > 0.53) & (mean < 0.57)).float()
        return torch.stack([1 - mean, mean - 0.9 + wrong], dim=1)

    x, y = torch.full((1, *SHAPE), 0.5), torch.tensor([0])
    starts = torch.zeros(1, *SHAPE)
    result = pgd_linf(window, x, y, eps=0.2, step_size=0.05, num_steps=4, starts=starts)
    assert result.adversarial_prediction.tolist() == [1]
    assert 0.53 < result.x_adv.mean() < 0.57
    assert result.num_evaluations.tolist() == [
        3
    ]  # clean, start, first step: then it left the batch
    assert len(seen) == 3
