"""Tensors against a network, key by key: what fits is loaded, and everything else is named."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from components.core.errors import CasemateError
from components.models.adapt import ShapePair, State, fit_sizes

SHOWN = 3  # names of each kind in the one-line error; the report has them all


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What became of each tensor; shapes are (in the weights, in the network)."""

    loaded: tuple[str, ...]  # as they are
    resampled: Mapping[str, ShapePair]  # loaded in another size
    fresh: tuple[str, ...]  # allowed to be missing: initial values stay
    missing: tuple[str, ...]  # in the network, not in the weights
    mismatched: Mapping[str, ShapePair]  # in both, with shapes that do not fit
    unused: tuple[str, ...]  # in the weights, not in the network
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.missing and not self.mismatched

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"complete": self.complete, **asdict(self)}

    def lines(self) -> list[str]:
        """One line per tensor that was not simply loaded, after the count of those that were."""
        lines = [f"{'loaded':<11}{len(self.loaded)} tensors"]
        for kind in ("resampled", "mismatched"):
            for name, (theirs, ours) in getattr(self, kind).items():
                lines.append(f"{kind:<11}{name}: {theirs} in the weights, {ours} in the network")
        for kind in ("fresh", "missing", "unused"):
            lines += [f"{kind:<11}{name}" for name in getattr(self, kind)]
        return lines + [f"{'note':<11}{note}" for note in self.notes]


class DoesNotFit(CasemateError):  # noqa: N818 - reads as the sentence it prints
    """Weights that leave a part of the network unset; carries the whole report."""

    def __init__(self, key: str, source: str, remedy: str, report: ImportReport) -> None:
        super().__init__(key, source, f"{_complaint(report)}; {remedy}")
        self.args = (key, source, remedy, report)  # what unpickling calls this with
        self.report = report


def _complaint(report: ImportReport) -> str:
    parts = []
    if report.missing:
        parts.append(f"lack {_some(report.missing)}")
    if report.mismatched:
        shapes = [f"{n} {theirs} for {ours}" for n, (theirs, ours) in report.mismatched.items()]
        parts.append(f"differ in shape at {_some(shapes)}")
    if report.unused:
        parts.append(f"hold {_some(report.unused)} that the network does not know")
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
    kernel_method: str = "bilinear",
) -> ImportReport:
    """Load `state` into `net`, resampling what follows the patch or image size.

    Tensors that `allow_missing` (globs) names keep their initial values if they are not there or do
    not fit. If anything else is left unset, nothing is loaded: `DoesNotFit` names it, with the key
    and value of `origin` before it and the `remedy` after it.
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
    fresh = [name for name in unset if any(fnmatchcase(name, glob) for glob in allow_missing)]
    report = ImportReport(
        loaded=tuple(name for name in fitting if name not in resampled),
        resampled=resampled,
        fresh=tuple(fresh),
        missing=tuple(name for name in unset if name not in shapes and name not in fresh),
        mismatched={n: shapes[n] for n in unset if n in shapes and n not in fresh},
        unused=tuple(name for name in fitted if name not in wanted),
    )
    if not report.complete:
        raise DoesNotFit(*origin, remedy, report)
    net.load_state_dict({name: fitted[name] for name in fitting}, strict=False)
    return report


def with_notes(report: ImportReport, notes: Sequence[str]) -> ImportReport:
    """The report with further remarks."""
    return replace(report, notes=(*report.notes, *notes))
