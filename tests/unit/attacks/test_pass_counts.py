"""What the planner counts for an attack is what the attack passes through a model that withstands.

Every registered attack is held to it: one that is added is tested here without a change.
"""

from dataclasses import replace

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.attacks.listing import attack_list, attention_scales, make_attack, scaled_attack
from components.attacks.sanity.audit import NUM_QUERIES, audit, audit_counts
from components.attacks.settings import ATTACKS, AasSettings, PgdSettings, ScaleAscentSettings
from components.attacks.square import MOST_AHEAD
from components.core.pass_counts import CLEAN, PassCounts
from components.models.counting import counted_passes

NUM_CLASSES, NUM_ITEMS = 5, 3
SMALL = {"num_steps": 6, "num_queries": 7, "num_shifts": 3, "num_angles": 3}
SINGLE = [kind for kind in ATTACKS if ATTACKS[kind].settings.has_short_form()]
MORE = {"num_restarts": 2, "eot_iter": 3, "num_targets": 2}
CASES = [
    *((kind, norm, {}) for kind in SINGLE for norm in ATTACKS[kind].settings.norms),
    *(
        (kind, ATTACKS[kind].settings.norms[0], {key: value})
        for kind in SINGLE
        for key, value in MORE.items()
        if key in ATTACKS[kind].settings.__dataclass_fields__
    ),
    ("spatial", "spatial", {"num_shifts": 2}),
    ("autoattack", "linf", {"version": "plus"}),
    ("autoattack", "linf", {"version": "rand"}),
]


class Stubborn(nn.Module):
    """Wide margins with gradients: every item withstands every attack."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(48, NUM_CLASSES, bias=False)
        generator = torch.Generator().manual_seed(0)
        self.net.weight.data = 1e-3 * torch.randn(NUM_CLASSES, 48, generator=generator)
        self.sure = nn.Parameter(100.0 * torch.eye(NUM_CLASSES)[0], requires_grad=False)

    def forward(self, x):
        return self.net(x.flatten(1)) + self.sure


def items():
    x = torch.rand(NUM_ITEMS, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    y = torch.zeros(NUM_ITEMS, dtype=torch.int64)
    return Items(x, y, tuple(map(str, range(NUM_ITEMS))), run_seed=0)


def small(kind, changes):
    settings = ATTACKS[kind].settings(kind=kind)
    return replace(settings, **{k: v for k, v in SMALL.items() if hasattr(settings, k)} | changes)


@pytest.mark.parametrize(("kind", "norm", "changes"), CASES, ids=str)
def test_an_item_that_withstands_costs_what_is_counted(kind, norm, changes):
    settings = small(kind, changes)
    attack = make_attack(settings, norm=norm, eps=1.0 if norm == "spatial" else 0.1)
    with attack_mode(Stubborn()) as model, counted_passes(model) as seen:
        result = attack(model, items())
    assert (result.adversarial_prediction == 0).all()
    counts = settings.pass_counts(NUM_CLASSES)
    kinds = [member.kind for member in settings.members()]
    # A run of FAB that meets no boundary at all has no last point to look at.
    runs = sum(12 for kind in kinds if kind.startswith("fab"))
    assert NUM_ITEMS * (counts.forward - runs) <= result.num_evaluations.sum()
    assert result.num_evaluations.sum() <= NUM_ITEMS * counts.forward
    if "square" in kinds:  # queries are asked ahead: those after an improvement are asked again
        assert seen.counts.forward >= result.num_evaluations.sum()
    else:
        assert seen.counts.forward == result.num_evaluations.sum()
    assert seen.counts.to_pixels == NUM_ITEMS * counts.to_pixels
    assert seen.counts.to_weights == counts.to_weights == 0
    assert settings.most_evaluations(NUM_CLASSES) == counts.forward


@pytest.mark.parametrize("surrogate", ["network", "gradient"])
def test_scaled_attacks_and_their_search_cost_what_is_counted(surrogate):
    shape = {"img_size": 4, "patch_size": 2, "embed_dim": 8, "depth": 1, "num_heads": 2}
    net = VisionTransformer(**shape, num_classes=NUM_CLASSES)
    net.head.bias.data = 100.0 * torch.eye(NUM_CLASSES)[0]
    search = ScaleAscentSettings(objective="ce", num_draws=2, num_steps=3, batch_size=2)
    settings = AasSettings(inner=PgdSettings(num_steps=4), search=search, surrogate=surrogate)
    (listed,) = attack_list([settings], norm="linf", eps=0.1)
    with attack_mode(net), counted_passes(net) as seen:
        scales = attention_scales(settings, net, net, items())
    assert len(scales) == settings.num_candidates == 5
    assert seen.counts == NUM_ITEMS * search.pass_counts()
    attack = scaled_attack(listed, net, [(0.5,)] * 5)  # a factor of 1 would need no look
    with attack_mode(net), counted_passes(net) as seen:
        attack.examine(net, items())
        attack.restarts()(net, items())
    assert seen.counts == NUM_ITEMS * settings.pass_counts(NUM_CLASSES)


def test_the_sanity_suite_costs_what_is_counted():
    counts = audit_counts(norm="linf", eps=0.1, num_pixels=48, num_items=NUM_ITEMS, surrogate=False)
    with attack_mode(Stubborn()) as model, counted_passes(model) as seen:
        audit(model, items(), net=model, norm="linf", eps=0.1)
    assert seen.counts.to_pixels == NUM_ITEMS * counts.to_pixels
    # Without access to its attention it is looked at once less; Square asks ahead, in vain where an
    # earlier query improves.
    least = NUM_ITEMS * (counts.forward - 1)
    assert least <= seen.counts.forward <= least + NUM_ITEMS * NUM_QUERIES * MOST_AHEAD


def test_every_registered_attack_has_counts():
    wrapped = {kind for kind in ATTACKS if kind not in SINGLE}
    assert wrapped == {"aas"}  # tested above
    for kind in SINGLE:
        assert ATTACKS[kind].settings(kind=kind).pass_counts(10) is not None
    assert CLEAN + CLEAN == 2 * CLEAN == PassCounts(forward=2)
