"""Match tensors with a network by key: load those that fit and report all others."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from components.core.errors import CasemateError
from components.models.adapt import ShapePair, State, fit_sizes

SHOWN = 3  # names of each kind in the one-line error; the report has them all
# Tensors that do not contribute to the logits of the network, so may be left out.
COUNTERS = "*num_batches_tracked"  # not in files of torch below 0.4.1; eval mode never reads it
IDLE = re.compile(
    r"(pooler|pre_logits|head_dist|normali[sz]er?|sub_block1)\..*"  # TRADES never calls sub_block1
    r"|(.*\.)?(attn_mask|relative_position_index|relative_coords_table|attention_bias_idxs)"
    r"|(.*\.)?num_batches_tracked"
)


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Result for each tensor; shapes are (in the weights, in the network)."""

    loaded: tuple[str, ...]  # unchanged
    resampled: Mapping[str, ShapePair]  # loaded in another size
    fresh: tuple[str, ...]  # allowed to be missing: initial values are kept
    missing: tuple[str, ...]  # in the network, not in the weights
    mismatched: Mapping[str, ShapePair]  # in both, with shapes that do not fit
    unused: tuple[str, ...]  # in the weights, not in the network
    ignored: tuple[str, ...] = ()  # the same, but idle (`IDLE`) or allowed to be left out

    @property
    def complete(self) -> bool:
        return not self.missing and not self.mismatched and not self.unused

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"complete": self.complete, **asdict(self)}

    def lines(self) -> list[str]:
        """The number of loaded tensors, then one line per other tensor."""
        kinds = ("resampled", "mismatched", "fresh", "missing", "unused", "ignored")
        return [f"{'loaded':<11}{len(self.loaded)} tensors", *self._listed(kinds)]

    def refused(self, most: int) -> list[str]:
        """At most `most` lines about tensors that do not fit, and the number of all others."""
        lines = self._listed(("mismatched", "missing", "unused"))
        left = len(lines) - most
        more = [f"{'':<11}and {left} more (--json lists all)"] if left > 0 else []
        return [*lines[:most], *more]

    def _listed(self, kinds: Sequence[str]) -> list[str]:
        lines = []
        for kind in kinds:
            found = getattr(self, kind)
            for name in found:
                shapes = ""
                if isinstance(found, Mapping):
                    theirs, ours = found[name]
                    shapes = f": {theirs} in the weights, {ours} in the network"
                lines.append(f"{kind:<11}{name}{shapes}")
        return lines


class DoesNotFit(CasemateError):  # noqa: N818 - reads as the sentence it prints
    """Weights do not match the network: tensors are unset or left over; holds the report."""

    def __init__(self, key: str, source: str, remedy: str, report: ImportReport) -> None:
        super().__init__(key, source, f"{_mismatches(report)}; {remedy}")
        self.args = (key, source, remedy, report)  # arguments of unpickling
        self.report = report


def _mismatches(report: ImportReport) -> str:
    parts = []
    if report.missing:
        parts.append(f"lack {_some(report.missing)}")
    if report.mismatched:
        shapes = [f"{n} {theirs} for {ours}" for n, (theirs, ours) in report.mismatched.items()]
        parts.append(f"differ in shape at {_some(shapes)}")
    if report.unused:
        parts.append(f"hold {_some(report.unused)} that the network does not have")
    return ", ".join(parts)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def load_matching(
    net: nn.Module,
    state: State,
    *,
    origin: tuple[str, str],
    remedy: str,
    allow_missing: Sequence[str] = (),
    allow_unused: Sequence[str] = (),
    kernel_method: str = "bilinear",
) -> ImportReport:
    """Load `state` into `net`, resampling tensors that depend on the patch or image size.

    Tensors that match `allow_missing` (globs), and counters of batches, keep their initial values
    if they are missing or do not fit; those that match `allow_unused`, or that are idle, may be
    absent from `net`. If any other tensor is unset or left over, nothing is loaded: `DoesNotFit`
    names it, after the key and value of `origin` and before the `remedy`.
    """
    fitted, resampled = fit_sizes(state, net, kernel_method=kernel_method)
    wanted = net.state_dict()
    shapes: dict[str, ShapePair] = {
        name: (tuple(fitted[name].shape), tuple(value.shape))
        for name, value in wanted.items()
        if name in fitted
    }
    fitting = [name for name, (theirs, ours) in shapes.items() if theirs == ours]
    unset = [name for name in wanted if name not in fitting]
    fresh = _fitting_globs(unset, [*allow_missing, COUNTERS])
    extra = [name for name in fitted if name not in wanted]
    ignored = {*_fitting_globs(extra, allow_unused), *filter(IDLE.fullmatch, extra)}
    report = ImportReport(
        loaded=tuple(name for name in fitting if name not in resampled),
        resampled=resampled,
        fresh=tuple(fresh),
        missing=tuple(name for name in unset if name not in shapes and name not in fresh),
        mismatched={n: shapes[n] for n in unset if n in shapes and n not in fresh},
        unused=tuple(name for name in extra if name not in ignored),
        ignored=tuple(name for name in extra if name in ignored),
    )
    if not report.complete:
        raise DoesNotFit(*origin, remedy, report)
    if broken := [name for name in fitting if not torch.isfinite(fitted[name]).all()]:
        raise CasemateError(*origin, f"hold NaN or infinity in {_some(broken)}")
    net.load_state_dict({name: fitted[name] for name in fitting}, strict=False)
    return report


def _fitting_globs(names: Iterable[str], globs: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]
