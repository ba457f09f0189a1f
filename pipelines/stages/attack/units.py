"""The units of an attack step: they depend on settings and robust items, never on the cluster."""

from collections.abc import Iterator, Mapping, Sequence

from components.attacks.listing import ListedAttack, attack_list
from components.attacks.scales import Scales
from components.attacks.settings import PgdSettings
from components.core.units import Unit
from pipelines.recipe.schema.attack import AttackSection
from pipelines.stages.attack.worker import AttackTask, AuditTask, CleanTask, ScalesTask

ITEMS_PER_UNIT = 100
CURVE_STEPS = 20  # of PGD along the curve over eps

CurveUnits = Mapping[tuple[str, float], list[Unit]]  # by (`eps` or `steps`, value)


def _chunks(items: Sequence[int], micro_batch: int) -> Iterator[tuple[int, ...]]:
    """Even pieces, as few as the size of a unit allows: they depend on the items alone.

    A unit fills at least one pass.
    """
    count = -(-len(items) // max(ITEMS_PER_UNIT, micro_batch))
    for i in range(count):
        yield tuple(items[i * len(items) // count : (i + 1) * len(items) // count])


def _about(model: str, items: tuple[int, ...]) -> str:
    return f"{model}, test items {items[0]} to {items[-1]}"


def clean_units(model: str, num_items: int, *, micro_batch: int) -> list[Unit]:
    return [
        Unit(f"clean-{model}-{i:06d}", _about(model, items), CleanTask(model, items), len(items))
        for i, items in enumerate(_chunks(range(num_items), micro_batch))
    ]


def attack_units(
    name: str,
    model: str,
    listed: ListedAttack,
    items: Sequence[int],
    scales: tuple[Scales, ...],
    *,
    num_classes: int,
    micro_batch: int,
) -> list[Unit]:
    most = listed.most_evaluations(num_classes)
    return [
        Unit(
            f"{name}-{model}-{i:06d}",
            f"{listed.name} on {_about(model, chunk)}",
            AttackTask(model, listed, chunk, scales),
            len(chunk),
            most * len(chunk),
        )
        for i, chunk in enumerate(_chunks(items, micro_batch))
    ]


def curve_units(
    section: AttackSection, model: str, num_items: int, *, num_classes: int, micro_batch: int
) -> CurveUnits:
    """The units of every point of both curves."""
    if section.curves is None:
        return {}
    assert section.eps is not None
    points = {("eps", eps): (eps, CURVE_STEPS) for eps in section.curves.eps}
    points |= {("steps", steps): (section.eps, steps) for steps in section.curves.steps}
    items = range(min(section.curves.num_items, num_items))
    units = {}
    for (key, value), (eps, steps) in points.items():
        (listed,) = attack_list([PgdSettings(num_steps=steps)], norm=section.norm, eps=eps)
        units[key, value] = attack_units(
            f"curve-{key}-{value!r}",
            model,
            listed,
            items,
            (),
            num_classes=num_classes,
            micro_batch=micro_batch,
        )
    return units


def scale_units(model: str, listed: Sequence[ListedAttack]) -> dict[str, Unit]:
    return {
        attack.name: Unit(
            f"scales-{attack.name}-{model}",
            f"factors of {attack.name} for {model}",
            ScalesTask(model, attack.scaling),
        )
        for attack in listed
        if attack.scaling
    }


def audit_units(section: AttackSection, model: str, num_items: int) -> list[Unit]:
    if section.sanity is None:
        return []
    surrogate = section.surrogate if section.surrogate != model else None
    task = AuditTask(model, min(section.sanity.num_items, num_items), surrogate)
    return [Unit(f"sanity-{model}", f"sanity suite of {model}", task, task.num_items)]
