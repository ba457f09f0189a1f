"""The header of l2 votes: the noise, the method, and what was declared before the first draw.

Headers without `method` are of the first version: a fixed number of draws.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from components.certify.header import FieldTypes, VotesHeader
from components.certify.l2.radius import Method
from components.certify.l2.sequential import SELECT_LEAD, SELECT_STEP, SequentialPlan
from components.core.errors import CasemateError
from components.core.noise_streams import NoiseKind, noise_kind

PRECISIONS = ("float32", "tf32", "bfloat16")  # of the classifier that voted
METHODS: tuple[Method, ...] = ("fixed", "sequential", "randomized")
L2_FIELDS: FieldTypes = {
    "sigma": (int, float),
    "num_select": int,
    "num_estimate": int,
    "run_seed": int,
}
DECLARED: FieldTypes = {
    "radii": list,
    "failure_prob": (int, float),
    "look_every": int,
    "futility_prob": (int, float),
    "select_step": int,
    "select_lead": int,
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """How the draws of l2 votes were made, from their header."""

    sigma: float
    num_select: int
    num_estimate: int
    run_seed: int
    method: Method
    names_method: bool  # False: the first version, whose certificates have another layout
    declared: Mapping[str, Any] | None
    denoiser: Mapping[str, Any] | None
    precision: str
    compiled: bool

    def settings(self) -> dict[str, Any]:
        """Settings of a worker that draws the same votes."""
        names = (field.name for field in fields(self) if field.name != "names_method")
        return {name: getattr(self, name) for name in names}


def drawn_of(header: VotesHeader) -> Drawn:
    """The recorded settings of l2 votes."""
    recorded = header.settings
    return Drawn(
        float(recorded["sigma"]),
        recorded["num_select"],
        recorded["num_estimate"],
        recorded["run_seed"],
        recorded.get("method", "fixed"),
        "method" in recorded,
        recorded.get("declared"),
        recorded.get("denoiser"),
        recorded.get("precision", "float32"),
        recorded.get("compiled", False),
    )


def generator_of(header: VotesHeader) -> NoiseKind:
    """The generator of the recorded draws."""
    for method in METHODS:
        if kind := noise_kind(header.noise_impl, method):
            return kind
    remedy = "draws in a way that this version does not know: its votes cannot be repeated"
    raise CasemateError("noise_impl of the votes", header.noise_impl, remedy)


def method_of(header: VotesHeader) -> Method:
    """The method: it defines the number of draws and the bound of an item."""
    return drawn_of(header).method


def is_sequential(header: VotesHeader) -> bool:
    """Whether items stop drawing when their declared radii are decided."""
    return method_of(header) == "sequential"


def declare(
    *, radii: list[float], failure_prob: float, look_every: int, futility_prob: float
) -> dict[str, object]:
    """`settings.declared` of sequential votes: everything that determines when an item stops."""
    return {
        "radii": sorted(set(radii)),
        "failure_prob": failure_prob,
        "look_every": look_every,
        "futility_prob": futility_prob,
        "select_step": SELECT_STEP,
        "select_lead": SELECT_LEAD,
    }


def plan_of(header: VotesHeader) -> SequentialPlan:
    """The plan under which sequential votes were drawn; rejects an invalid one."""
    drawn, declared = drawn_of(header), header.settings["declared"]
    return _plan(
        sigma=drawn.sigma,
        radii=tuple(float(radius) for radius in declared["radii"]),
        failure_prob=float(declared["failure_prob"]),
        num_estimate=drawn.num_estimate,
        look_every=declared["look_every"],
        futility_prob=float(declared["futility_prob"]),
    )


_plan = lru_cache(maxsize=16)(SequentialPlan)  # its tables of thresholds are made once


def check_l2_header(header: VotesHeader) -> None:
    """Raise unless method and declaration are consistent and can certify an item."""
    method: str = method_of(header)
    declared = header.settings.get("declared")
    if method not in METHODS:
        raise CasemateError("method", method, f"is not one of {', '.join(METHODS)}")
    if drawn_of(header).precision not in PRECISIONS:
        known = f"is not one of {', '.join(PRECISIONS)}"
        raise CasemateError("precision", drawn_of(header).precision, known)
    if not isinstance(drawn_of(header).compiled, bool):
        raise CasemateError("compiled", drawn_of(header).compiled, "is neither true nor false")
    if (method == "sequential") != (declared is not None):
        raise CasemateError("declared", declared, "must be set iff method is sequential")
    if declared is None:
        return
    for name, kind in DECLARED.items():
        if not isinstance(declared, Mapping) or not isinstance(declared.get(name), kind):
            raise CasemateError("declared", declared, f"lacks {name}, or its type is wrong")
    if not all(isinstance(radius, int | float) for radius in declared["radii"]):
        raise CasemateError("declared", declared, "has radii that are not numbers")
    if not declared["radii"] or min(declared["select_step"], declared["select_lead"]) < 1:
        raise CasemateError("declared", declared, "needs radii, a select_step and a select_lead")
    plan_of(header)
