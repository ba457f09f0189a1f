"""Attacks by name, and the published list of them that is called AutoAttack.

Croce & Hein 2020, "Reliable evaluation of adversarial robustness with an ensemble of diverse
parameter-free attacks", sec. 5; versions, order and restarts are those of its published code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from components.attacks.apgd import Apgd, ApgdTargeted
from components.attacks.fab import Fab, FabTargeted
from components.attacks.fgsm import Fgsm
from components.attacks.gama import GamaPgd
from components.attacks.interface import Attack
from components.attacks.momentum import Mim
from components.attacks.pgd import Pgd
from components.attacks.spatial import SpatialGrid
from components.attacks.square import Square
from components.core.errors import CasemateError

BUDGET = ("norm", "eps")


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of attacks, and the settings that its name has already decided."""

    attack: Any  # a dataclass whose instances are attacks
    decided: Mapping[str, object] = field(default_factory=dict)

    def settings(self) -> list[str]:
        """What a user may still choose, beside the budget."""
        taken = {*BUDGET, *self.decided}
        return sorted(f.name for f in fields(self.attack) if f.name not in taken)


KINDS: Mapping[str, Kind] = {
    "fgsm": Kind(Fgsm),
    "pgd": Kind(Pgd),
    "mim": Kind(Mim),
    "gama": Kind(GamaPgd),
    "apgd-ce": Kind(Apgd, {"loss": "ce"}),
    "apgd-dlr": Kind(Apgd, {"loss": "dlr"}),
    "apgd-t": Kind(ApgdTargeted),
    "fab": Kind(Fab),
    "fab-t": Kind(FabTargeted),
    "square": Kind(Square),
    "spatial": Kind(SpatialGrid),
}

# Version: its attacks in order, with the settings that are not the defaults of their classes. In
# `rand`, each gradient is the mean of 20, for models that draw random numbers.
AUTOATTACK: Mapping[str, Sequence[tuple[str, Mapping[str, object]]]] = {
    "standard": (("apgd-ce", {}), ("apgd-t", {}), ("fab-t", {}), ("square", {})),
    "plus": (
        ("apgd-ce", {"num_restarts": 5}),
        ("apgd-dlr", {"num_restarts": 5}),
        ("fab", {"num_restarts": 5}),
        ("square", {}),
        ("apgd-t", {}),
        ("fab-t", {}),
    ),
    "rand": (("apgd-ce", {"eot_iter": 20}), ("apgd-dlr", {"eot_iter": 20})),
}


def make_attack(kind: str, *, norm: str, eps: float, **settings: object) -> Attack:
    """One attack; an unknown kind or setting is refused with the known ones.

    `spatial` has no pixel budget, so it takes norm `spatial` and eps 1, the whole range, only.
    """
    if kind not in KINDS:
        raise CasemateError("attack.kind", kind, f"is unknown; choose one of {', '.join(KINDS)}")
    chosen = KINDS[kind]
    known = chosen.settings()
    if unknown := sorted(set(settings) - set(known)):
        listed = ", ".join(known) or "none"
        raise CasemateError(f"{kind}.{unknown[0]}", "", f"is no setting; there are: {listed}")
    attack: Attack
    if kind == "spatial":
        attack = chosen.attack(**settings)
        if (norm, eps) != (attack.norm, attack.eps):
            budget = f"{norm} {eps:g}"
            raise CasemateError(
                "spatial", budget, "is a budget it cannot keep; write norm: spatial, eps: 1"
            )
        return attack
    attack = chosen.attack(norm=norm, eps=eps, **chosen.decided, **settings)
    return attack


def autoattack(version: str, *, norm: str, eps: float) -> tuple[Attack, ...]:
    """The attacks of one version, for `run_cascade` in this order."""
    if version not in AUTOATTACK:
        known = ", ".join(AUTOATTACK)
        raise CasemateError("autoattack.version", version, f"is unknown; choose one of {known}")
    return tuple(
        make_attack(kind, norm=norm, eps=eps, **settings) for kind, settings in AUTOATTACK[version]
    )


def min_classes(attack: Attack) -> int:
    """The fewest classes an attack can work with: DLR ranks 3 logits, its targeted form 4."""
    inner = getattr(attack, "inner", None)
    if inner is not None:  # a wrapper such as rescaled attention
        return min_classes(inner)
    if isinstance(attack, ApgdTargeted):
        return 4
    return 3 if getattr(attack, "loss", None) == "dlr" else 2


def check_class_count(attacks: Sequence[Attack], *, num_classes: int) -> None:
    """Refuse a list that could not finish, before its first attack has cost anything."""
    for attack in attacks:
        needed = min_classes(attack)
        if num_classes < needed:
            raise CasemateError(
                attack.name,
                f"{num_classes} classes",
                f"are too few, it needs {needed}; use pgd (ce, margin), apgd-ce, fab-t and square",
            )
