"""Transfer: budgets, exact storage, the matrix against a loop over items, and counted work."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.evaluate.settings import TransferSuiteSettings
from components.evaluate.transfer import (
    Perturbation,
    TransferModel,
    craft,
    measurements,
    transfer_predictions,
)

LEVEL = 1 / 255
SHAPE = (3, 8, 8)


def network(seed, shape=SHAPE, scale=5.0):
    """Networks of all seeds have a part in common, so that they agree now and then."""
    with torch.random.fork_rng():
        torch.manual_seed(99)
        size = int(np.prod(shape))
        layers = [nn.Flatten(), nn.Linear(size, 16), nn.Tanh(), nn.Linear(16, 4)]
        net = nn.Sequential(*layers).eval().requires_grad_(False)
        torch.manual_seed(seed)
        net[1].weight.add_(0.5 * net[1].weight.std() * torch.randn_like(net[1].weight))
    net[1].weight.mul_(scale)
    return net


def stored_images(seed=0, num_items=12, shape=SHAPE):
    """Pixels of 8-bit images, black and white ones among them."""
    levels = torch.randint(
        0, 256, (num_items, *shape), generator=torch.Generator().manual_seed(seed)
    )
    levels[:, :, 0] = 0
    levels[:, :, 1] = 255
    return levels.float() / 255


def problem(seeds=(0, 1, 2), num_items=12):
    x = stored_images(num_items=num_items)
    models = [TransferModel(f"m{seed}", network(seed), SHAPE) for seed in seeds]
    y = models[0].logits_of(x).argmax(dim=1)
    y[:2] = (y[:2] + 1) % 4  # two that the first model has wrong
    return models, x, y, [f"i{row:02d}" for row in range(num_items)]


def slow_attack(net, image, label, *, step, num_steps):
    """One image in float64: sign steps, clipped to the pixel range."""
    net = net.double()
    start = image.double()
    z = start.clone()
    for _ in range(num_steps):
        z.requires_grad_()
        loss = F.cross_entropy(net(z[None]), label[None])
        (gradient,) = torch.autograd.grad(loss, z)
        z = (z.detach() + step * gradient.sign()).clamp(0, 1)
    net.float()
    return z


@pytest.mark.parametrize(("attack", "num_steps"), [("fgsm", 1), ("pgd", 8)])
def test_perturbations_are_the_published_steps(attack, num_steps):
    models, x, y, _ = problem()
    for model in models:
        found = craft(model.logits_of, x, y, attack, TransferSuiteSettings()).applied(x)
        for row in range(len(x)):
            expected = slow_attack(
                model.logits_of, x[row], y[row], step=LEVEL / num_steps, num_steps=num_steps
            )
            torch.testing.assert_close(found[row].double(), expected, atol=3e-7, rtol=0)


@pytest.mark.parametrize("attack", ["fgsm", "pgd"])
@pytest.mark.parametrize("eps", [LEVEL, 8 / 255])
def test_budget_and_range_hold_and_the_loss_rises(attack, eps):
    _, x, y, _ = problem()
    net = network(5, scale=1.0)  # smooth enough for a step of the first order
    x_adv = craft(net, x, y, attack, TransferSuiteSettings(eps=eps)).applied(x)
    assert float((x_adv.double() - x.double()).abs().max()) <= eps
    assert 0 <= float(x_adv.min()) <= float(x_adv.max()) <= 1
    losses = [F.cross_entropy(net(z), y, reduction="none") for z in (x, x_adv)]
    if eps == LEVEL:
        assert (losses[1] >= losses[0]).all()
    assert losses[1].mean() > losses[0].mean()


def test_stored_images_have_perturbations_in_whole_eighths_of_a_level():
    models, x, y, _ = problem()
    found = craft(models[0].logits_of, x, y, "pgd", TransferSuiteSettings())
    assert found.kept.dtype == torch.int8  # also where black and white pixels clip the steps
    assert found.unit == LEVEL / 8
    assert found.kept.abs().max() == 8
    assert len(found.kept.unique()) > 3
    delta = found.applied(x).double() - x.double()
    torch.testing.assert_close(delta * 8 * 255, found.kept.double(), atol=3e-4, rtol=0)
    again = Perturbation(found.kept.clone(), found.unit, found.eps)
    assert torch.equal(again.applied(x), found.applied(x))
    eight_bits = (found.applied(x) * 255).round() / 255
    assert not torch.equal(eight_bits, found.applied(x))  # what a PNG would keep


def test_images_between_levels_are_kept_as_floats_where_steps_are_clipped():
    models, x, y, _ = problem()
    x = (x * 0.9983).clamp(0, 1)
    x[:, :, 0] = 0.3 * LEVEL  # less than a level from the edge, in thirds
    how = TransferSuiteSettings()
    found = craft(models[1].logits_of, x, y, "fgsm", how)
    assert found.kept.dtype == torch.float32
    assert torch.equal(found.applied(x), found.kept)
    inner = x.clamp(0.1, 0.9)
    assert craft(models[1].logits_of, inner, y, "pgd", how).kept.dtype == torch.int8


def test_more_steps_than_a_byte_counts_are_kept_as_floats():
    _, x, y, _ = problem()
    x = x.clamp(0.2, 0.8)
    linear = network(3, scale=0.01)  # nearly
    for num_steps, kind in ((127, torch.int8), (128, torch.float32)):
        how = TransferSuiteSettings(eps=0.1, num_steps=num_steps)
        found = craft(linear, x, y, "pgd", how)
        assert found.kept.dtype == kind  # far from black and white, where steps would be clipped
        assert float((found.applied(x).double() - x.double()).abs().max()) == pytest.approx(0.1)


def slow_matrix(models, x, y, attack, how):
    """Counts of one attack by loops over pairs and items."""
    clean = {
        m.name: [bool(m.logits_of(x).argmax(1)[i] == y[i]) for i in range(len(x))] for m in models
    }
    cells = {}
    for source in models:
        x_adv = craft(source.logits_of, x, y, attack, how).applied(x)
        own = source.logits_of(x_adv).argmax(1)
        for target in models:
            prediction = target.logits_of(x_adv).argmax(1)
            right = moved = fell = 0
            for i in range(len(x)):
                right += bool(prediction[i] == y[i])
                fooled = clean[source.name][i] and bool(own[i] != y[i])
                if fooled and clean[target.name][i]:
                    moved += 1
                    fell += bool(prediction[i] != y[i])
            cells[source.name, target.name] = (right, fell, moved)
    return {name: sum(verdicts) for name, verdicts in clean.items()}, cells


def test_matrix_drop_and_rate_follow_their_definitions():
    models, x, y, ids = problem(num_items=24)
    how = TransferSuiteSettings(eps=12 / 255)
    table = transfer_predictions(models, {SHAPE: x}, y, ids, how)
    found = measurements(table, {m.name: m.shape for m in models}, how)
    rates = []
    for attack in how.attacks:
        clean, cells = slow_matrix(models, x, y, attack, how)
        for (source, target), (right, fell, moved) in cells.items():
            rows = {m.metric: m for m in found[target] if m.item == f"{attack}/{source}"}
            assert rows["accuracy"].value == right / 24
            assert rows["accuracy"].level == 12 / 255
            assert rows["drop"].value == pytest.approx((right - clean[target]) / 24)
            assert rows["transfer_rate"].value == (fell / moved if moved else None)
            assert rows["transfer_rate"].n == (moved or None)
            assert source != target or moved == fell > 0  # the white box fools itself
            rates.append(rows["transfer_rate"].value)
        assert all(
            next(m for m in found[name] if m.item == "clean").value == count / 24
            for name, count in clean.items()
        )
    assert len(set(rates)) > 3


def test_a_copy_has_the_rows_of_its_original():
    models, x, y, ids = problem()
    models = [models[0], TransferModel("copy", network(0), SHAPE), models[1]]
    how = TransferSuiteSettings()
    table = transfer_predictions(models, {SHAPE: x}, y, ids, how)
    found = measurements(table, {m.name: m.shape for m in models}, how)
    for target in found:
        values = {(m.item, m.metric): m.value for m in found[target]}
        for attack in ("fgsm", "pgd"):
            for metric in ("accuracy", "drop", "transfer_rate"):
                assert values[f"{attack}/copy", metric] == values[f"{attack}/m0", metric]
    assert found["copy"] == found["m0"]


def test_every_perturbation_is_made_once_and_every_pair_evaluated_once():
    models, x, y, ids = problem()
    passes = Counter()

    def counted(model):
        def logits_of(z):
            passes[model.name, torch.is_grad_enabled()] += len(z)
            return model.logits_of(z)

        return TransferModel(model.name, logits_of, model.shape)

    transfer_predictions([counted(m) for m in models], {SHAPE: x}, y, ids, TransferSuiteSettings())
    for model in models:
        assert passes[model.name, True] == 9 * len(x)  # one step of FGSM, eight of PGD
        assert passes[model.name, False] == (1 + 2 * 3) * len(
            x
        )  # clean; two attacks, three sources


def test_rows_may_come_in_any_order():
    models, x, y, ids = problem()
    how = TransferSuiteSettings()
    shapes = {m.name: m.shape for m in models}
    table = transfer_predictions(models, {SHAPE: x}, y, ids, how)
    order = np.random.default_rng(0).permutation(len(table))
    assert measurements(table.take(order), shapes, how) == measurements(table, shapes, how)
    with pytest.raises(ValueError, match="other items"):
        measurements(table.slice(1), shapes, how)


def test_other_sizes_have_no_result_or_a_flagged_one():
    models, x, y, ids = problem((0, 1))
    small = (3, 6, 6)
    models.append(TransferModel("small", network(7, small), small))
    images = {SHAPE: x, small: stored_images(3, len(x), small)}
    how = TransferSuiteSettings()
    shapes = {m.name: m.shape for m in models}
    found = measurements(transfer_predictions(models, images, y, ids, how), shapes, how)
    cells = [m for m in found["small"] if m.item == "pgd/m0"]
    assert [(m.metric, m.value) for m in cells] == [
        ("accuracy", None),
        ("drop", None),
        ("transfer_rate", None),
    ]
    assert cells[0].flags == ("null: the source takes 3x8x8, the target 3x6x6",)
    own = {m.metric: m.value for m in found["small"] if m.item == "pgd/small"}
    assert own["accuracy"] is not None
    assert own["drop"] is not None
    resized = TransferSuiteSettings(resample="bilinear")
    found = measurements(transfer_predictions(models, images, y, ids, resized), shapes, resized)
    cell = next(m for m in found["small"] if m.item == "fgsm/m0")
    assert cell.value is not None
    assert cell.flags == ("resampled",)
    assert next(m for m in found["m1"] if m.item == "fgsm/m0").flags == ()
    x_adv = craft(models[0].logits_of, x, y, "fgsm", how).resized(x, images[small])
    assert 0 < float((x_adv - images[small]).abs().max()) <= LEVEL
    gray = (1, 8, 8)
    models.append(TransferModel("gray", network(8, gray), gray))
    images[gray] = x.mean(dim=1, keepdim=True)
    shapes["gray"] = gray
    found = measurements(transfer_predictions(models, images, y, ids, resized), shapes, resized)
    assert next(m for m in found["gray"] if m.item == "fgsm/m0").value is None


def test_bad_input_is_named():
    models, _, y, ids = problem()
    with pytest.raises(CasemateError, match=r"transfer: m0 needs images of 3x8x8"):
        transfer_predictions(models, {}, y, ids, TransferSuiteSettings())
    with pytest.raises(SettingError, match="names an attack twice"):
        TransferSuiteSettings(attacks=("pgd", "pgd"))
    with pytest.raises(SettingError, match="eps: 8 is outside"):
        TransferSuiteSettings(eps=8)
    with pytest.raises(SettingError, match="attacks"):
        TransferSuiteSettings(attacks=())
