"""Label leaking: attacked images that are easier than clean ones (Kurakin et al. 2017, sec. 4.3).

An attack can only lower accuracy unless the model has learned to recognise it. The null hypothesis
is that an item on which clean and attacked predictions differ in correctness is as likely to be
lost as won. A sign test on these items (McNemar 1947) rejects it; a minimum effect size prevents a
stop for negligible leaks.
"""

from collections import deque
from collections.abc import Mapping

import torch
from scipy.special import bdtrc
from torch import Tensor

from components.core.errors import CasemateError


class LeakDetector:
    """Watches the last `window` probes of a training with `num_steps` attack steps.

    It needs the counts of all workers, so that all of them stop at the same step.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        window: int = 20,
        smallest_leak: float = 0.02,
        failure_prob: float = 1e-6,
    ) -> None:
        self.num_steps = num_steps
        self.smallest_leak, self.failure_prob = smallest_leak, failure_prob
        self._probes: deque[tuple[int, int, int]] = deque(maxlen=window)

    def update(self, metrics: Mapping[str, float | Tensor], *, num_items: int) -> None:
        """Take the metrics of one step on `num_items` items, if the step was probed."""
        if "rescued" in metrics:
            counts = (float(metrics[key]) * num_items for key in ("rescued", "broken"))
            rescued, broken = map(round, counts)
            self._probes.append((rescued, broken, num_items))

    @property
    def leak(self) -> float:
        """Attacked minus clean accuracy over the window; 0 before the first probe."""
        rescued, broken, items = self._totals()
        return (rescued - broken) / items if items else 0.0

    def found(self) -> bool:
        """Whether the attack helps: P(Bin(n, 1/2) >= rescued) is below `failure_prob`."""
        rescued, broken, _ = self._totals()
        chance = float(bdtrc(rescued - 1, rescued + broken, 0.5))
        return self.leak >= self.smallest_leak and chance < self.failure_prob

    def check(self) -> None:
        """Raise an error with a remedy if labels leak."""
        if not self.found():
            return
        remedy = "use num_steps: 2" if self.num_steps == 1 else "use more steps or a smaller eps"
        raise CasemateError(
            "train.objective.num_steps",
            self.num_steps,
            f"leaks labels: attacked training images are classified better than clean ones, by "
            f"{100 * self.leak:.1f} points; {remedy}",
        )

    def state(self) -> Tensor:
        """(probes, 3) int64: the state in a checkpoint."""
        return torch.tensor(list(self._probes), dtype=torch.int64).view(-1, 3)

    def restore(self, state: Tensor) -> None:
        self._probes.clear()
        self._probes.extend((int(r), int(b), int(n)) for r, b, n in state.tolist())

    def _totals(self) -> tuple[int, int, int]:
        rescued, broken, items = self.state().sum(dim=0).tolist()
        return rescued, broken, items
