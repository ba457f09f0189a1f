"""The headline strip of a model card: clean, certified, attacked and shifted accuracy."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from components.certify.registry import FAMILIES, family_of
from components.report.card import figures
from components.report.card.figures import Figure

FIRST = ("patch", "l2")  # certified threats in the order of the papers
HEADLINE_SHIFTS = {"ImageNet-R": "imagenet-r", "ImageNet-A": "imagenet-a"}


def headlines(every: Sequence[Figure]) -> Iterator[Figure]:
    """Clean, certified, attacked, shifted; what was never run says so."""
    yield _clean(every)
    for name in _certified_threats():
        yield _certified(every, name)
    yield from _attacked(every)
    yield from _corrupted(every)
    yield from _shifted(every)
    yield _first(every, figures.SHAPE, "Shape bias", "Shape bias")


def _certified_threats() -> list[str]:
    """The threats of all certificate families, each once."""
    names = dict.fromkeys(family_of(kind).threat_name for kind in FAMILIES)
    return [name for name in dict.fromkeys((*FIRST, *names)) if name in names]


def _clean(every: Sequence[Figure]) -> Figure:
    own = [f for f in every if f.suite == figures.CLEAN and f.share is not None]
    if not own:
        return _refused_or_missing(every, figures.CLEAN, figures.CLEAN)
    return max(own, key=lambda f: (f.num_items or 0, f.source.startswith("evaluate")))


def _certified(every: Sequence[Figure], name: str) -> Figure:
    """The headline of the certificate, as in the report; of several, that of the largest budget."""
    suite, title = f"Certificates, {name}", f"Certified {name}"
    shown = [f for f in every if f.suite == suite and f.is_headline]
    own = [f for f in shown if f.kind == "proven"]
    if not own:
        unsound = [f for f in shown if f.state == "not sound"]
        return unsound[0] if unsound else _refused_or_missing(every, suite, title)
    size = max(map(_size, own))
    rivals = [f for f in own if _size(f) == size]
    best = max(rivals, key=lambda f: f.share.value if f.share else 0.0)
    if len(rivals) == 1:
        return best
    return replace(best, note=f"the highest of {len(rivals)} certificates, chosen on these items")


def _size(figure: Figure) -> float:
    """The share of the image of a patch, or the radius."""
    return figure.area if figure.area is not None else figure.budget or 0.0


def _attacked(every: Sequence[Figure]) -> Iterator[Figure]:
    """The lowest robust accuracy under every threat; AutoAttack says so if it was not run."""
    own = [f for f in every if f.suite.startswith("Attacks") and f.share is not None]
    if not any(map(figures.is_autoattack, own)):
        yield figures.missing("Attacks", "AutoAttack")
    threats: dict[str, list[Figure]] = {}
    for figure in own:
        threats.setdefault(figure.detail, []).append(figure)
    for group in threats.values():
        lowest = min(group, key=lambda f: (f.share.value if f.share else 1.0, f.source))
        title, _, members = lowest.title.partition(": ")
        detail = ": ".join(filter(None, (lowest.detail, members)))
        yield replace(lowest, title=title, detail=detail)
    yield from [f for f in every if f.suite.startswith("Attacks") and f.state == "not verified"]


def _corrupted(every: Sequence[Figure]) -> Iterator[Figure]:
    own = [f for f in every if f.suite == figures.CORRUPTIONS]
    means = [f for f in own if f.title in figures.MEANS]
    filled = [f for f in means if f.state == "verified"]
    yield (filled or means)[-1] if means else _refused_or_missing(every, figures.CORRUPTIONS)
    scores = [f for f in own if f.title == figures.SCORES["mce"]]
    yield scores[0] if scores else figures.missing(figures.CORRUPTIONS, "mCE")


def _shifted(every: Sequence[Figure]) -> Iterator[Figure]:
    own = [f for f in every if f.suite == figures.SHIFTS and "unmasked" not in f.detail]
    for title, name in HEADLINE_SHIFTS.items():
        if not any(f.title.lower() == name for f in own):
            yield figures.missing(figures.SHIFTS, title)
    yield from own


def _first(every: Sequence[Figure], suite: str, shown: str, title: str) -> Figure:
    own = [f for f in every if f.suite == suite and f.title == shown]
    return own[0] if own else _refused_or_missing(every, suite, title)


def _refused_or_missing(every: Sequence[Figure], suite: str, title: str = "") -> Figure:
    """What was refused of the suite: also a certificate whose threat cannot be read any more."""
    suites = [suite]
    if suite in figures.certificate_suites():
        suites.append(figures.CERTIFICATES)
    refused = [f for f in every if f.suite in suites and f.state == "not verified"]
    return refused[0] if refused else figures.missing(suite, title)
