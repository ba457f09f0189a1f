"""From settings to attacks: one attack, or a recipe's list with ensembles expanded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count

from torch import nn

from components.attacks.aas import ScaledAttack
from components.attacks.base_settings import AttackSettings, UserAttackSettings
from components.attacks.interface import Attack, Items
from components.attacks.scales import Scales, ScaleSearch, global_scales
from components.attacks.settings import ATTACKS, AasSettings
from components.attacks.user import user_attack
from components.core.errors import CasemateError
from components.core.settings import values_of


@dataclass(frozen=True, slots=True)
class ListedAttack:
    """One attack of a list; `entry` names its entry in the recipe, `name` is unique in the list."""

    name: str
    entry: str
    settings: AttackSettings
    attack: Attack  # with attention scaling: the inner attack

    @property
    def scaling(self) -> AasSettings | None:
        """Attention scaling around the attack, if any."""
        return self.settings.scaling

    def most_evaluations(self, num_classes: int) -> int:
        """The most forward passes of an item; 0 with scaling, which runs it many times."""
        return self.settings.most_evaluations(num_classes)


def make_attack(settings: AttackSettings, *, norm: str, eps: float) -> Attack:
    """The attack that these settings describe, with its budget."""
    if isinstance(settings, UserAttackSettings):
        return user_attack(settings, norm=norm, eps=eps)
    implementation = ATTACKS[settings.kind].load()
    attack: Attack = implementation(**values_of(settings), norm=norm, eps=eps)
    return attack


def attack_list(
    entries: Iterable[AttackSettings], *, norm: str, eps: float | None
) -> list[ListedAttack]:
    """The attacks of these entries in order, with ensembles expanded.

    An attack that is already in the list is left out: with the same random numbers it finds the
    same points again. `eps` None means the whole pixel range, the budget of norm `spatial`.
    """
    budget = 1.0 if eps is None else eps
    listed: list[ListedAttack] = []
    for entry in entries:
        for member in entry.members():
            if any(member == x.settings for x in listed):
                continue
            taken = {x.name for x in listed}  # names used by other settings of the same family
            free = (f"{member.name}-{number}" for number in count(2))
            name = next(n for n in chain([member.name], free) if n not in taken)
            attack = make_attack(member.base_attack, norm=norm, eps=budget)
            listed.append(ListedAttack(name, entry.name, member, attack))
    return listed


def check_class_count(attacks: Iterable[AttackSettings], *, num_classes: int) -> None:
    """Reject attacks that need more classes, before the first attack runs."""
    for attack in attacks:
        if num_classes < attack.min_classes:
            raise CasemateError(
                attack.base_attack.name,
                f"{num_classes} classes",
                f"are too few: it needs {attack.min_classes}; "
                "use pgd (ce, margin), apgd-ce, fab-t and square",
            )


def attention_scales(
    entry: AasSettings, model: nn.Module, net: nn.Module, reference: Items
) -> list[Scales]:
    """The candidates of a scaled attack. Hold `attack_mode(model)` around the call."""
    found = [global_scales(net, scale) for scale in entry.scales]
    if entry.search:
        found += ScaleSearch(**values_of(entry.search))(model, net, reference)
    return found


def scaled_attack(listed: ListedAttack, net: nn.Module, scales: Sequence[Scales]) -> ScaledAttack:
    """The attack of an `aas` entry on a loaded network."""
    assert listed.scaling is not None
    return ScaledAttack(
        net=net, inner=listed.attack, scales=tuple(scales), surrogate=listed.scaling.surrogate
    )
