"""Cost of a list of attacks: passes of items that withstand all of them, and of none that do.

Passes have `micro_batch` rows: the last one of a unit is padded.
"""

from collections.abc import Iterator

from components.attacks.base_settings import AttackSettings
from components.attacks.sanity.audit import audit_counts
from components.attacks.settings import AasSettings, PgdSettings
from components.certify.estimate import device_bytes
from components.core.errors import CasemateError
from components.core.pass_counts import CLEAN, PassCounts
from pipelines.recipe.costs import (
    NUM_CLASSES,
    CostedNetwork,
    Question,
    StepCost,
    Work,
    image_side,
    known_splits,
    unknown_step,
)
from pipelines.recipe.facts import known_channels, source_info
from pipelines.recipe.model_costs import model_cost
from pipelines.recipe.schema.attack import AttackSection
from pipelines.recipe.schema.recipe import Recipe

ITEMS_PER_UNIT = 100  # as in `units.py`, which needs torch's attacks
CURVE_STEPS = 20
ROW_BYTES = 60  # of an item, attack and model in the results
EXAMPLES = 12  # images that are kept of each model
ROWS = 50  # of a pass where `micro_batch: auto` leaves them to the first worker
FILES = 3  # attacks.parquet, examples.npz, summary.json


def costs_of(recipe: Recipe, asked: Question) -> list[StepCost]:
    """One step per entry of the attack section."""
    return [_step(recipe, name, section, asked) for name, section in recipe.attack.items()]


def _step(recipe: Recipe, name: str, section: AttackSection, asked: Question) -> StepCost:
    step = f"attack.{name}"
    try:
        count = _num_items(recipe, section, asked, key=step)
        networks = {model: model_cost(recipe, model) for model in section.models}
    except CasemateError as error:
        return unknown_step(step, error)
    num_classes = source_info(recipe.data).num_classes or NUM_CLASSES
    works = [
        work
        for model, network in networks.items()
        for work in _works(recipe, section, model, network, count, num_classes, asked)
    ]
    channels, side = known_channels(recipe.data) or 3, image_side(recipe)
    pixels, members = channels * side * side, _members(section)
    return StepCost(
        step=step,
        num_items=count,
        works=works,
        memory=max(
            device_bytes(
                params=network.costs.params,
                activation_bytes=network.costs.activation_bytes,
                micro_batch=rows_of_pass(section),
                dtype="fp32",
            )
            for network in networks.values()
        ),
        storage=len(networks) * (count * len(members) * ROW_BYTES + EXAMPLES * pixels * 4),
        objects=FILES,
        assumed=_assumed(section, asked, num_classes),
        own={"num_models": len(networks), "least_passes": round(sum(w.least for w in works))},
    )


def _members(section: AttackSection) -> list[AttackSettings]:
    """The attacks in order, each once."""
    found: list[AttackSettings] = []
    for entry in section.attacks:
        found += [member for member in entry.members() if member not in found]
    return found


def _works(
    recipe: Recipe,
    section: AttackSection,
    model: str,
    network: CostedNetwork,
    count: int,
    num_classes: int,
    asked: Question,
) -> Iterator[Work]:
    rows = padded(count, rows_of_pass(section))

    def work(what: str, least: float, most: float, settings: AttackSettings | None) -> Work:
        return Work(
            what=f"{what} on {model}",
            most=most,
            least=least,
            flops=network.flops,
            net=network.net,
            probe=lambda lab: lab.attack(recipe, section, model, settings),
        )

    yield work("clean", rows, rows, None)
    for member in _members(section):
        counts = member.pass_counts(num_classes)
        if counts is not None:
            low, high = asked.between(0.0, rows * counts.cost)
            yield work(member.name, low, high, member.base_attack)
        if isinstance(member, AasSettings) and member.search:
            search = member.search
            num_items = min(search.num_items, count)
            passes = num_items * search.pass_counts().cost
            yield work(f"scales of {member.name}", passes, passes, member.base_attack)
    if section.curves:
        yield work("curves", *_curves(section, count, asked), PgdSettings(num_steps=CURVE_STEPS))
    if section.sanity and section.norm != "spatial" and section.eps is not None:
        num_items = min(section.sanity.num_items, count)
        side, channels = image_side(recipe), known_channels(recipe.data) or 3
        counts = audit_counts(
            norm=section.norm,
            eps=section.eps,
            num_pixels=channels * side * side,
            num_items=num_items,
            surrogate=section.surrogate not in (None, model),
        )
        low, high = asked.between(15.0, counts.cost)
        yield work("sanity", num_items * low, num_items * high, PgdSettings(num_steps=CURVE_STEPS))


def _curves(section: AttackSection, count: int, asked: Question) -> tuple[float, float]:
    """Least and most passes of both curves."""
    assert section.curves is not None
    rows = padded(min(section.curves.num_items, count), rows_of_pass(section))
    steps = [CURVE_STEPS] * len(section.curves.eps) + list(section.curves.steps)
    most = sum((PgdSettings(num_steps=n).pass_counts(2) for n in steps), PassCounts())
    return asked.between(rows * len(steps) * CLEAN.cost, rows * most.cost)


def rows_of_pass(section: AttackSection) -> int:
    """Rows of a pass; assumed where the first worker will measure which are fastest."""
    return ROWS if section.micro_batch == "auto" else section.micro_batch


def padded(count: int, micro_batch: int) -> int:
    """Rows of a pass over so many items, unit by unit, each padded to whole passes."""
    num_units = -(-count // ITEMS_PER_UNIT)
    sizes = [(i + 1) * count // num_units - i * count // num_units for i in range(num_units)]
    return sum(-(-size // micro_batch) * micro_batch for size in sizes)


def _num_items(recipe: Recipe, section: AttackSection, asked: Question, *, key: str) -> int:
    known = [n for n in (section.num_items, known_splits(recipe, asked)["test"]) if n]
    if not known:
        remedy = "is not known without the data; give --items N"
        raise CasemateError(f"{key}.num_items", "", remedy)
    return min(known)


def _assumed(section: AttackSection, asked: Question, num_classes: int) -> list[str]:
    found = []
    if asked.withstand is None:
        found.append("from no to all items withstand all attacks; --withstand 0.4 for a figure")
    if section.micro_batch == "auto":
        found.append(f"passes have {ROWS} rows, as long as micro_batch: auto is not decided")
    unknown = [m.name for m in _members(section) if m.pass_counts(num_classes) is None]
    if unknown:
        found.append(f"without {', '.join(unknown)}: its settings have no pass_counts")
    return found
