"""Published claims on denoised smoothing compared with the counts of `denoised.jsonl`.

Everything refers to Carlini et al. 2023, "(Certified!!) adversarial robustness for free!".
"""

from collections.abc import Mapping, Sequence

from notebooks.replications.experiments import Contrast, Experiment, share
from notebooks.replications.runs import Line, Lines
from notebooks.replications.statistics import Estimate, paired

STEP = 1 / 16  # between the radii at which certified items are counted: exact in binary
SIGMAS = {"025": 0.25, "050": 0.5, "100": 1.0}  # by the ends of names
REGIMES = {
    "sigma025": "0.25 alone",
    "sigma050": "0.5 alone",
    "sigma100": "1 alone",
    "three": "0.25, 0.5 and 1",
    "to025": "0 to 0.25",
    "to100": "0 to 1",
    "full": "the whole schedule",
}
UNMEASURED = "not measured"  # no published sign to reproduce
SAMPLERS = {
    "one-shot": "one pass",
    "ancestral16": "16 random steps",
    "ancestral64": "64 random steps",
    "heun6": "Heun, 6 levels (11 passes)",
}
SAMPLED = ("one-shot", "ancestral16", "heun6")  # at both of these noise levels
SAMPLED_AT = ("050", "100")
Row = Mapping[str, Sequence[float]]  # measure -> percentages, one per seed


def percent(line: Line, radius: float | None) -> float:
    """Share certified at a radius, or with None the share of correct draws."""
    if radius is None:
        return share((line["right_draws"], line["num_items"] * line["num_estimate"]))
    certified, place = line["certified"], round(radius / STEP)
    if place * STEP != radius:
        raise ValueError(f"radius {radius} was not counted")
    return share((certified[place] if place < len(certified) else 0, line["num_items"]))


def values(lines: Lines, certificate: str, radius: float | None) -> list[float]:
    """Percentages, one per seed."""
    return [percent(line, radius) for line in lines.find(certificate=certificate)]


def best(lines: Lines, arm: str, radius: float) -> list[float]:
    """Certified at a radius with the sigma that certifies most there, one percentage per seed."""
    by_sigma = [values(lines, f"{arm}-{end}", radius) for end in SIGMAS]
    return [max(found) for found in zip(*by_sigma, strict=True)]


def single(lines: Lines, denoiser: str, sigma: float) -> list[float]:
    """Correct single draws behind a denoiser, one percentage per seed."""
    found = lines.find(denoiser=denoiser, sigma=sigma)
    return [share((line["right"], line["num_items"])) for line in found]


def _at(lines: Lines, certificate: str, radii: Sequence[float]) -> Row:
    row = {"single draws": values(lines, certificate, None)}
    row["label"] = values(lines, certificate, 0)
    return row | {f"certified, {r:g}": values(lines, certificate, r) for r in radii}


def _table(rows: Mapping[str, Row]) -> dict[str, dict[str, Estimate]]:
    return {
        row: {measure: Estimate(tuple(found)) for measure, found in measures.items()}
        for row, measures in rows.items()
    }


def _between(lines: Lines, first: str, second: str, radius: float | None) -> Estimate:
    return paired(values(lines, first, radius), values(lines, second, radius))


def experiments_of(lines: Lines) -> list[Experiment]:
    makers = (_noise, _denoiser, _tuning, _steps, _flow, _regimes)
    return [make(lines) for make in makers]


def _noise(lines: Lines) -> Experiment:
    """Figure 2 and Table 6c."""
    radii = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
    compared = (
        ("100", "025", 0.25, "-36.4 (ViT, CIFAR-10)", -1),
        ("050", "025", 0.25, "-10.9 (ViT, CIFAR-10)", -1),
        ("050", "025", 1.0, "+32.1 (ViT, CIFAR-10)", +1),
        ("100", "050", 1.0, "-11.9 (ViT, CIFAR-10)", -1),
    )
    return Experiment(
        key="noise",
        claim="More noise certifies less at small radii, and reaches radii that less noise cannot.",
        table=_table({f"sigma {s:g}": _at(lines, f"plain-{e}", radii) for e, s in SIGMAS.items()}),
        contrasts=[
            Contrast(
                f"certified at {radius:g}, sigma {SIGMAS[a]:g} minus {SIGMAS[b]:g}",
                published,
                _between(lines, f"plain-{a}", f"plain-{b}", radius),
                sign,
            )
            for a, b, radius, published, sign in compared
        ],
        remark="The plain classifier behind the denoiser of the whole schedule. No votes could "
        "certify radius 1 with sigma 0.25, here or there: its side of that comparison is 0 by "
        "construction.",
    )


def _denoiser(lines: Lines) -> Experiment:
    """Table 2: WRN-28-10 behind the denoiser against Cohen et al. 2019, best sigma each."""
    arms = {
        "plain": "plain, denoiser",
        "noisy": "trained on noise, no denoiser",
        "bare": "plain, no denoiser",
    }
    published = {0.25: "+9.6", 0.5: "+12.7", 0.75: "+8.0", 1.0: "+4.1"}
    compared = [
        ("noisy", r, "trained on noise without one", f"{x} (WRN, CIFAR-10)", +1)
        for r, x in published.items()
    ]
    compared.append(("bare", 0.25, "plain without one", UNMEASURED, 0))
    return Experiment(
        key="denoiser",
        claim="A classifier trained without noise is certified better behind a denoiser than one "
        "trained on noise without a denoiser.",
        table=_table(
            {
                said: {f"certified, {r:g}": best(lines, arm, r) for r in published}
                for arm, said in arms.items()
            }
        ),
        contrasts=[
            Contrast(
                f"certified at {radius:g}, best sigma: plain behind the denoiser minus {other}",
                figure,
                paired(best(lines, "plain", radius), best(lines, arm, radius)),
                sign,
            )
            for arm, radius, other, figure, sign in compared
        ],
        remark="For each radius and seed the sigma of 0.25, 0.5 and 1 that certifies most of the "
        "test items, as published. Published figures compare with a ResNet-110 of Cohen et al. 2019. "
        "Here both classifiers are the same network and saw as many digits; the denoiser has weights "
        "of its own.",
    )


def _tuning(lines: Lines) -> Experiment:
    """Tables 3 and 6."""
    compared = (
        ("050", 0.5, "+2.7 (ViT), +12.4 (WRN)"),
        ("050", 0.25, "+1.2 (ViT), +11.3 (WRN)"),
        ("050", 1.0, "+3.4 (ViT), +10.3 (WRN)"),
        ("025", 0.25, "+2.6 (ViT), +6.1 (WRN)"),
        ("100", 0.5, "+8.4 (ViT), +19.5 (WRN)"),
        ("100", 1.0, "+8.8 (ViT), +16.3 (WRN)"),
    )
    contrasts = [
        Contrast(
            f"certified at {radius:g}, sigma {SIGMAS[end]:g}: tuned minus plain",
            f"{figures}, CIFAR-10",
            _between(lines, f"tuned-{end}", f"plain-{end}", radius),
            +1,
        )
        for end, radius, figures in compared
    ]
    contrasts.append(
        Contrast(
            "certified at 0.5, sigma 0.5: tuned minus trained as long without noise",
            UNMEASURED,
            _between(lines, "tuned-050", "longer-050", 0.5),
            0,
        )
    )
    rows = {
        f"sigma {sigma:g}, {said}": f"{arm}-{end}"
        for end, sigma in SIGMAS.items()
        for arm, said in (("plain", "plain"), ("tuned", "tuned on denoised images"))
    }
    rows["sigma 0.5, trained as long without noise"] = "longer-050"
    return Experiment(
        key="tuning",
        claim="A classifier that is tuned on denoised images is certified better behind the denoiser.",
        table=_table({row: _at(lines, name, (0.25, 0.5, 0.75, 1.0)) for row, name in rows.items()}),
        contrasts=contrasts,
        remark="One classifier is tuned for each sigma, for half as many epochs again as the plain one "
        "was trained; the last comparison is with one that saw as many digits without noise.",
    )


def _sampled(lines: Lines, samplers: Sequence[str]) -> dict[str, dict[str, Estimate]]:
    return _table(
        {
            f"sigma {SIGMAS[end]:g}, {SAMPLERS[name]}": _at(
                lines, f"{name}-{end}", (0.125, 0.25, 0.5)
            )
            for end in SAMPLED_AT
            for name in samplers
            if name in SAMPLED or end == "050"
        }
    )


def _steps(lines: Lines) -> Experiment:
    """Section 5.1, which gives no figures."""
    compared = (("ancestral16", "050"), ("ancestral64", "050"), ("ancestral16", "100"))
    return Experiment(
        key="random steps",
        claim="Denoising in one pass is more faithful, and certifies more, than the many random "
        "steps by which a diffusion model draws images.",
        table=_sampled(lines, ("one-shot", "ancestral16", "ancestral64")),
        contrasts=[
            Contrast(
                f"{_measured(radius)}, sigma {SIGMAS[end]:g}: {SAMPLERS[name]} minus one pass",
                "below 0, no figure",
                _between(lines, f"{name}-{end}", f"one-shot-{end}", radius),
                -1,
            )
            for name, end in compared
            for radius in (None, 0.25)
        ],
        remark="Few steps spread over the schedule instead of all of its steps: the denoiser, the "
        "classifier and the noise of the images are the same for all.",
    )


def _flow(lines: Lines) -> Experiment:
    """Section 5.3 and Table 5."""
    published = {
        "050": "+1.5 (ViT), +9.0 (WRN), CIFAR-10",
        "100": "+3.2 (ViT), +18.0 (WRN), CIFAR-10",
    }
    return Experiment(
        key="deterministic steps",
        claim="The deterministic sampler of Karras et al. 2022 gives images that are recognised "
        "better than those of one pass.",
        table=_sampled(lines, ("one-shot", "heun6")),
        contrasts=[
            Contrast(
                f"{_measured(radius)}, sigma {SIGMAS[end]:g}: {SAMPLERS['heun6']} minus one pass",
                published[end] if radius is None else UNMEASURED,
                _between(lines, f"heun6-{end}", f"one-shot-{end}", radius),
                +1 if radius is None else 0,
            )
            for end in SAMPLED_AT
            for radius in (None, 0.25)
        ],
        remark="6 noise levels instead of 18, and the same denoiser for both samplers.",
    )


def _measured(radius: float | None) -> str:
    return "single draws" if radius is None else f"certified at {radius:g}"


def _regimes(lines: Lines) -> Experiment:
    """Section 5.2 and Table 4."""
    compared = (
        ("three", "sigma050", 0.5, +8.0),
        ("three", "sigma025", 0.25, +2.6),
        ("three", "sigma100", 1.0, +7.5),
        ("full", "sigma025", 0.25, +6.5),
        ("full", "sigma050", 0.5, +12.2),
        ("full", "sigma100", 1.0, +9.3),
        ("to100", "three", 0.25, +2.4),
        ("to100", "three", 0.5, +3.5),
        ("to100", "three", 1.0, +3.0),
        ("to025", "sigma025", 0.25, +5.5),
        ("sigma025", "sigma050", 0.5, -43.9),
        ("sigma050", "sigma025", 0.25, -64.5),
        ("sigma050", "sigma100", 1.0, -20.1),
    )
    contrasts = [
        Contrast(
            f"single draws, sigma {sigma:g}: trained on {REGIMES[a]} minus {REGIMES[b]}",
            f"{figure:+} (ViT, CIFAR-10)",
            paired(single(lines, a, sigma), single(lines, b, sigma)),
            +1 if figure > 0 else -1,
        )
        for a, b, sigma, figure in compared
    ]
    return Experiment(
        key="training noise",
        claim="A denoiser that was trained on several noise levels is better at each of them than "
        "one that was trained on that level alone, and a level that was not trained on is denoised badly.",
        table=_table(
            {
                said: {f"tested at {s:g}": single(lines, name, s) for s in SIGMAS.values()}
                for name, said in REGIMES.items()
            }
        ),
        contrasts=contrasts,
        remark="All denoisers are the same network and take the same number of steps, under a "
        "thousand where diffusion models take hundreds of thousands: in a short training a network may "
        "learn one level better than many.",
    )
