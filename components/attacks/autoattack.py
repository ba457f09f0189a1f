"""AutoAttack: the published ensemble, whose versions are lists of attacks in `settings.py`.

Croce & Hein 2020, "Reliable evaluation of adversarial robustness with an ensemble of diverse
parameter-free attacks", sec. 5; versions, order and restarts are those of its published code.
"""

from components.attacks.cascade import run_cascade
from components.attacks.interface import Attack, AttackResult, BudgetedAttack, Items
from components.attacks.listing import make_attack
from components.attacks.settings import AutoAttackSettings
from components.core.settings import settings
from components.core.types import LogitsFn


@settings
class AutoAttack(BudgetedAttack, AutoAttackSettings):
    """All members one after the other, each on the rows that are robust to those before it."""

    def attacks(self) -> tuple[Attack, ...]:
        """The members, in order."""
        return tuple(make_attack(own, norm=self.norm, eps=self.eps) for own in self.members())

    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        done = run_cascade(self.attacks(), logits_of, items)
        return AttackResult(
            x_adv=done.x_adv,
            clean_prediction=done.state.clean_prediction,
            adversarial_prediction=done.state.adversarial_prediction,
            num_evaluations=done.state.num_evaluations,
            num_gradients=done.state.num_gradients,
            num_zero_gradients=done.state.num_zero_gradients,
            margins=done.margins,
        )
