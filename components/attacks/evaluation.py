"""A list of attacks on a loaded model in this process, as the attack stage runs it on a cluster."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from components.attacks.aas import worst_of
from components.attacks.base_settings import AttackSettings
from components.attacks.cascade import CascadeResult, Outcome, after_attack, clean_result
from components.attacks.gradient import in_fixed_batches
from components.attacks.gradients import attack_mode
from components.attacks.interface import AttackResult, Items
from components.attacks.listing import ListedAttack, attention_scales, scaled_attack
from components.attacks.passes import AttackPasses
from components.attacks.sanity.model import refuse_probabilities
from components.attacks.sanity.outcomes import cascade_findings
from components.core.types import Images, LogitsFn
from components.models.fast import fast_forward
from components.models.logits import check_independent_rows, check_logits
from components.models.pixels import PixelModel

ROWS = 100  # rows per call of an attack; results do not depend on it


def attack_model(
    model: PixelModel,
    items: Items,
    attacks: Sequence[ListedAttack],
    *,
    passes: AttackPasses,
    on_progress: Callable[[int, str], None] = lambda rows, attack: None,
) -> CascadeResult:
    """Every attack on the rows that are robust to all before it.

    Every forward pass has the same number of rows, as in the stage: logits depend on the batch
    shape. `passes` are not compiled. `on_progress` is called with the number of rows that an attack
    has finished.
    """
    with attack_mode(model), fast_forward(model.net):
        fixed = in_fixed_batches(passes.logits_of(model), size=passes.micro_batch)
        with torch.no_grad():
            logits = check_logits(fixed(items.x), items.item_ids)
        refuse_probabilities(logits, model=model.spec.architecture)
        check_attackable(model, items.x, name=model.spec.architecture)
        done = clean_result(items, logits).copy()
        for listed in attacks:
            rows = done.state.robust_rows
            on_progress(len(items) - len(rows), listed.name)  # nothing to do for the others
            attack = _runnable(listed, model, items) if len(rows) else listed.attack
            found = []
            for part in torch.split(rows, ROWS) if len(rows) else ():
                result = attack(fixed, items.take(part))
                done.take(part, result)
                found.append(Outcome.of(result))
                on_progress(len(part), listed.name)
            outcome = _joined(found, empty=rows)
            done = replace(done, state=after_attack(done.state, listed.name, outcome))
    return done


def check_attackable(model: PixelModel, x: Images, *, name: str) -> None:
    """Reject a network that mixes the images of a batch: attacks on one would change others.

    Random networks are allowed; the attacks of `rand` are for them.
    """
    check_independent_rows(model, x, network=model, name=name, may_be_random=True)


def weaknesses(
    entries: Sequence[AttackSettings], eps: float | None, result: CascadeResult
) -> Iterator[str]:
    """Reasons why robust accuracy may be overstated: weak settings, findings about the attacks."""
    for entry in entries:
        yield from (f"{entry.name}: {problem}" for problem in entry.weaknesses(eps))
    if all(entry.weak_alone for entry in entries):
        names = ", ".join(entry.name for entry in entries)
        yield f"{names} alone overstates robustness; add pgd, apgd-ce or autoattack"
    for finding in cascade_findings(result.state):
        if not finding.ok:
            yield f"{finding.name}: {finding.text}"


def _runnable(
    listed: ListedAttack, model: PixelModel, items: Items
) -> Callable[[LogitsFn, Items], AttackResult]:
    """The attack of one entry; a scaled attack with the factors searched for this model."""
    entry, plain = listed.scaling, listed.attack
    if entry is None:
        return plain
    count = min(entry.search.num_items if entry.search else 0, len(items))
    reference = items.take(torch.arange(count, device=items.y.device))
    scaled = scaled_attack(listed, model.net, attention_scales(entry, model, model.net, reference))

    def with_control(logits_of: LogitsFn, rows: Items) -> AttackResult:
        # Rows that plain restarts break are broken, too, as in the stage.
        found, control = scaled(logits_of, rows), scaled.restarts()(logits_of, rows)
        return worst_of(found, control, rows.y, torch.arange(len(rows), device=rows.y.device))

    return with_control


def _joined(parts: Sequence[Outcome], *, empty: Tensor) -> Outcome:
    """Outcomes of consecutive rows as one."""
    if not parts:
        return Outcome(*[empty] * len(fields(Outcome)))
    names = [field.name for field in fields(Outcome)]
    return Outcome(**{name: torch.cat([getattr(p, name) for p in parts]) for name in names})
