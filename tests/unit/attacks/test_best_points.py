"""Every attack returns its best point for every row, as `interface.py` defines it.

All registered attacks are held to it, with small counts where they have them: one that is added to
the registry is tested here without a change. Attacks of users and lists of attacks follow; the
challenges of certificates, which have their own functions, are held to it by their own tests.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from components.attacks.apgd import Apgd
from components.attacks.cascade import run_cascade
from components.attacks.gradient import Fgsm, Pgd, in_fixed_batches, probability_margin
from components.attacks.gradients import attack_mode
from components.attacks.interface import Attack, AttackResult, Items, Search
from components.attacks.listing import attack_list, make_attack, scaled_attack
from components.attacks.losses import cross_entropy, dlr, margin
from components.attacks.scales import global_scales
from components.attacks.settings import ATTACKS, AasSettings, ApgdSettings
from components.attacks.user import user_attack
from components.core.evaluations import EVALUATIONS
from components.core.user_code import UserEntry, pinned, reading, settings_class
from tests.unit.networks import scattered

NUM_CLASSES = 5
BUDGETS = {"linf": 0.01, "l2": 0.1, "spatial": 1.0}
SMALL = {"num_steps": 8, "num_queries": 40, "max_shift": 1.0, "num_shifts": 3, "max_angle": 4.0,
         "num_angles": 3}  # fmt: skip
OWN_LOSSES = dict.fromkeys(("fgsm", "pgd", "mim", "apgd-ce"), cross_entropy) | {
    "apgd-dlr": dlr,
    "gama": probability_margin,
}  # of all others: the margin
CASES = [
    (kind, norm)
    for kind in ATTACKS
    if ATTACKS[kind].settings.has_short_form()
    for norm in ATTACKS[kind].settings.norms
]


@pytest.fixture(scope="module")
def net():
    """An untrained network whose classes compete."""
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    net = scattered(lambda: VisionTransformer(**shape, num_classes=NUM_CLASSES), by=0.3)
    with torch.no_grad():
        net.get_classifier().bias -= net(images(100)).mean(dim=0)
    with attack_mode(net):
        yield net


def images(num_items):
    """Smooth ones: small turns and shifts change little."""
    coarse = torch.rand(num_items, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.interpolate(coarse, size=16, mode="bicubic").clamp(0, 1)


@pytest.fixture(scope="module")
def items(net):
    """Labels are the network's own predictions; the first row is wrong from the start."""
    x = images(16)
    y = net(x).argmax(dim=1)
    y[0] = (y[0] + 1) % NUM_CLASSES
    return Items(x, y, tuple(f"item-{i}" for i in range(len(x))), run_seed=3)


def small(kind):
    settings = ATTACKS[kind].settings(kind=kind)
    return replace(settings, **{k: v for k, v in SMALL.items() if hasattr(settings, k)})


def assert_best_points(
    result: AttackResult, net, items, *, norm, eps, loss_of=margin, all_moved=True
):
    """Survivors have moved, inside the budget, to a point whose loss is not below the clean one."""
    moved = (result.x_adv.double() - items.x.double()).flatten(1)
    size = moved.norm(dim=1) if norm == "l2" else moved.abs().amax(dim=1)
    assert (size <= eps).all()
    assert 0 <= result.x_adv.min() <= result.x_adv.max() <= 1
    with torch.no_grad():
        before, after = net(items.x), net(result.x_adv)
    robust = after.argmax(dim=1) == items.y
    assert robust.any()
    assert torch.equal(robust, result.adversarial_prediction == items.y)
    assert torch.equal(result.x_adv[0], items.x[0])  # misclassified: not attacked
    losses = [loss_of(logits, items.y)[robust] for logits in (before, after)]
    assert (losses[1] >= losses[0] - 1e-6).all()  # logits round by their place in a batch
    torch.testing.assert_close(result.known_margins, margin(after, items.y))
    if all_moved:
        assert (size[robust] > 0).all()
        assert (losses[1] > losses[0]).all()


@pytest.mark.parametrize(("kind", "norm"), CASES, ids=" ".join)
def test_every_registered_attack_returns_its_best_points(net, items, kind, norm):
    attack, eps = make_attack(small(kind), norm=norm, eps=BUDGETS[norm]), BUDGETS[norm]
    loss_of = OWN_LOSSES.get(kind, margin)
    result = attack(net, items)
    assert_best_points(result, net, items, norm=norm, eps=eps, loss_of=loss_of)
    # Progress inside a unit is the share of the evaluations that it may take.
    most, robust = attack.most_evaluations(NUM_CLASSES), result.adversarial_prediction == items.y
    assert result.num_evaluations.max() <= most
    assert result.num_evaluations[robust].min() >= 0.6 * most


def test_evaluations_are_counted_where_the_model_is_called(net, items):
    before = EVALUATIONS.total
    result = Apgd(norm="linf", eps=0.01, num_steps=3)(in_fixed_batches(net, size=6), items)
    assert EVALUATIONS.total - before == result.num_evaluations.sum()


@pytest.mark.parametrize("surrogate", ["network", "gradient"])
def test_attention_scaling_returns_the_best_points_of_its_candidates(net, items, surrogate):
    entry = AasSettings(inner=ApgdSettings(num_steps=8), search=None, surrogate=surrogate)
    (listed,) = attack_list([entry], norm="linf", eps=BUDGETS["linf"])
    scaled = scaled_attack(listed, net, [global_scales(net, 0.5)])
    for result in (scaled(net, items), scaled.examine(net, items).result):
        assert_best_points(result, net, items, norm="linf", eps=BUDGETS["linf"])


def test_a_list_of_attacks_has_the_best_point_of_all_and_starts_each_at_the_image(net, items):
    budget = {"norm": "linf", "eps": BUDGETS["linf"]}
    attacks = [Fgsm(**budget), Apgd(**budget, num_steps=8), Pgd(**budget, num_steps=2)]
    spies = [Remembering(attack, []) for attack in attacks]
    done = run_cascade(spies, net, items)
    assert all(torch.equal(x, items.x[rows]) for spy in spies for rows, x in spy.given)
    robust, alone = done.state.robust, [attack(net, items) for attack in attacks]
    highest = torch.stack([result.known_margins for result in alone]).amax(dim=0)
    assert torch.equal(done.margins[robust], highest[robust])
    assert all((alone[k].known_margins < highest)[robust].any() for k in (0, 2))
    assert (done.x_adv[robust] != items.x[robust]).flatten(1).any(dim=1).all()
    begun = run_cascade(spies[:1], net, items)
    assert torch.equal(run_cascade(spies, net, items, done=begun).x_adv, done.x_adv)
    assert torch.equal(items.x, images(len(items)))


@dataclass(frozen=True)
class Remembering:
    """An attack that remembers the images that it was given."""

    attack: Attack
    given: list
    name, norm, eps = "remembering", "linf", BUDGETS["linf"]

    def __call__(self, logits_of, items):
        rows = torch.tensor([int(name.removeprefix("item-")) for name in items.item_ids])
        self.given.append((rows, items.x.clone()))
        return self.attack(logits_of, items)


OWN = """
from dataclasses import dataclass

import torch
from components.attacks.interface import AttackResult


class Corner:
    name = "corner"

    @dataclass(frozen=True)
    class Settings:
        pass

    def __init__(self, settings, *, norm, eps):
        self.eps = eps

    def __call__(self, logits_of, items):
        x_adv = (items.x + 0.999 * self.eps * items.normal("corner").sign()).clamp(0, 1)
        counts = torch.zeros_like(items.y)
        return AttackResult(x_adv, items.y, items.y, counts, counts, counts)
"""


def test_a_point_of_a_user_that_is_worse_gives_way_to_the_image(net, items, tmp_path):
    (tmp_path / "corner.py").write_text(OWN)
    with reading(base=tmp_path, trusted=True):
        kind = pinned("python:corner.py:Corner", field="kind")
        entry = UserEntry(kind=kind, settings=settings_class(kind, field="kind")())
        attack = user_attack(entry, norm="linf", eps=BUDGETS["linf"])
        result = attack(net, items)
    budget = {"norm": "linf", "eps": BUDGETS["linf"]}
    assert_best_points(result, net, items, **budget, all_moved=False)
    corner = attack.inner(net, items).x_adv
    worse = (margin(net(corner), items.y) < margin(net(items.x), items.y)) & (
        net(corner).argmax(dim=1) == items.y
    )
    kept = (result.x_adv == items.x).flatten(1).all(dim=1)
    assert torch.equal(kept[1:], worse[1:])
    assert 0 < int(kept[1:].sum()) < len(items) - 1


def test_the_clean_image_is_a_candidate_that_no_mistake_gives_way_to():
    items = Items(torch.zeros(4, 1, 1, 1), torch.tensor([0, 0, 0, 1]), tuple("abcd"), 0)
    right, sure, wrong = [1.0, 0.0], [2.0, 0.0], [0.0, 1.0]
    search = Search(lambda x: torch.tensor([right] * 4), items)
    points = torch.full((3, 1, 1, 1), 0.1)
    logits, rows = torch.tensor([right, sure, wrong]), torch.arange(3)
    search.visit(rows, points, logits, margin(logits, items.y[rows]))
    search.visit_clean(search.clean_margins)
    result = search.result()
    assert result.x_adv.flatten().tolist() == pytest.approx([0.1, 0.0, 0.1, 0.0])
    assert result.known_margins.tolist() == [-1.0, -1.0, 1.0, 1.0]
