"""The smoothed classifier as deployed: an image to a label with its radius, or an abstention.

Certificates are about this function, not about the network inside: every prediction uses noisy
copies of its own image.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.certify.l2.claims import certify_counts, check_can_certify
from components.certify.l2.noise import predict_block
from components.certify.l2.predict import ABSTAIN
from components.certify.l2.sequential import SequentialPlan, certify_prefix
from components.certify.l2.settings import GaussianSettings
from components.core.digests import digest_bytes
from components.core.seeding import DrawSpan
from components.core.settings import FLOAT32, default_of
from components.core.types import LogitsFn
from components.denoising.classifier import DenoisedClassifier


@dataclass(frozen=True, slots=True)
class CertifiedPrediction:
    """`label` -1 and `radius` 0 for an abstention; `radius` is an l2 distance in [0, 1] pixels."""

    label: int
    abstain: bool
    radius: float
    num_draws: int


@dataclass(frozen=True, slots=True)
class SmoothedClassifier:
    """CERTIFY of Cohen et al. 2019 for new images.

    With probability 1 - `failure_prob` per image the label is that of the smoothed classifier
    everywhere within the radius.
    """

    classify: LogitsFn | DenoisedClassifier
    num_classes: int
    sigma: float
    num_select: int = default_of(GaussianSettings, "num_select")
    num_estimate: int = default_of(GaussianSettings, "num_estimate")
    failure_prob: float = default_of(GaussianSettings, "failure_prob")
    micro_batch: int = default_of(GaussianSettings, "micro_batch")
    precision: str = FLOAT32
    device: str | torch.device = "cpu"

    def __post_init__(self) -> None:
        check_can_certify(n=self.num_estimate, alpha=self.failure_prob)

    def certify(self, image: Tensor, *, seed: int) -> CertifiedPrediction:
        """Label and radius of a (C, H, W) image, from all draws.

        `seed` must be fresh if an adversary could have searched for an image that exploits it.
        """
        counts = [
            np.bincount(self._draw(image, seed, stream, 0, count), minlength=self.num_classes)
            for stream, count in (("select", self.num_select), ("estimate", self.num_estimate))
        ]
        claim = certify_counts(*counts, sigma=self.sigma, alpha=self.failure_prob)
        return CertifiedPrediction(
            claim.prediction, claim.abstain, claim.radius, claim.n0 + claim.n
        )

    def certify_within(
        self,
        image: Tensor,
        *,
        seconds: float,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> CertifiedPrediction:
        """Like `certify`, from as many draws as the time allows; may exceed the time by one pass.

        The bound holds at all times at once (`sequential.py`), so that a deadline may end the draws
        at any point; the radius is a little smaller than that of the same number of draws fixed in
        advance.
        """
        deadline = clock() + seconds
        plan = SequentialPlan(
            sigma=self.sigma,
            radii=(),  # no early decision: the radius grows until the deadline
            failure_prob=self.failure_prob,
            num_estimate=self.num_estimate,
            look_every=self.micro_batch,
        )

        def draw(stream: str, count: int) -> NDArray[np.uint16]:
            found = [np.empty(0, np.uint16)]
            for start in range(0, count, self.micro_batch):
                if clock() >= deadline:
                    break
                stop = min(start + self.micro_batch, count)
                found.append(self._draw(image, seed, stream, start, stop))
            return np.concatenate(found)

        select, estimate = draw("select", self.num_select), draw("estimate", self.num_estimate)
        if not len(estimate):
            return CertifiedPrediction(ABSTAIN, True, 0.0, len(select))
        claim = certify_prefix(estimate, plan, chosen=int(np.bincount(select).argmax()))
        return CertifiedPrediction(
            claim.prediction, claim.abstain, claim.radius, len(select) + len(estimate)
        )

    def _draw(
        self, image: Tensor, seed: int, stream: str, start: int, stop: int
    ) -> NDArray[np.uint16]:
        return predict_block(
            self.classify,
            image,
            DrawSpan(seed, stream, digest_bytes(image.numpy().tobytes()), start, stop),
            sigma=self.sigma,
            micro_batch=self.micro_batch,
            device=self.device,
            precision=self.precision,
        )
