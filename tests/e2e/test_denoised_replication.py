"""The miniature replication of denoised smoothing: its figures, from counts made up here."""

from itertools import product

import pytest

from components.core.errors import CasemateError
from notebooks.replications import denoised, runs
from notebooks.replications import denoised_findings as findings
from notebooks.replications import denoised_page as page
from tests.e2e.cli import ROOT

pytestmark = pytest.mark.e2e
ENDS = findings.SIGMAS
ADDED = {f"{arm}-{end}" for arm in ("tuned", "bare") for end in ENDS} | {"longer-050"}
ARMS = {"plain": 60, "noisy": 50, "tuned": 70, "bare": 20, "longer": 63}
SAMPLED = {"one-shot": 60, "ancestral16": 52, "ancestral64": 50, "heun6": 66}


def certificate(seed, name, *, right, items, draws):
    """Of 100 items `right` are certified at radius 0, and four fewer with each further 1/16."""
    end = name.rpartition("-")[2]
    sigma = findings.SIGMAS[end]
    certified = [right - 4 * place for place in range(round(2 * sigma / findings.STEP))]
    return {
        "seed": seed, "certificate": name, "sigma": sigma, "num_select": 10, "num_estimate": draws,
        "failure_prob": 0.001, "num_items": items, "right_draws": right * draws,
        "certified": [max(0, count) for count in certified],
    }  # fmt: skip


@pytest.fixture(scope="module")
def lines():
    """Every recipe's certificate and every denoiser at every noise level, for three seeds."""
    found = []
    for seed in (0, 1, 2):
        for name in (*denoised.base_recipe(seed).certify, *ADDED):
            arm, _, end = name.rpartition("-")
            right = (ARMS | SAMPLED)[arm] - 5 * list(findings.SIGMAS).index(end)
            draws = 64 if arm in SAMPLED else 500
            found.append(certificate(seed, name, right=right, items=100, draws=draws))
        for (number, name), sigma in product(enumerate(findings.REGIMES), findings.SIGMAS.values()):
            where = {"seed": seed, "denoiser": name, "sigma": sigma, "num_items": 200}
            found.append(where | {"right": 100 + 10 * number + seed * (name == "full")})
    return found[::-1]  # in any order


def contrast_of(experiment, text):
    return next(contrast for contrast in experiment.contrasts if text in contrast.what)


def test_differences_are_those_of_the_counts(lines):
    noise, denoiser, tuning, steps, flow, regimes = findings.experiments_of(runs.Lines(lines))
    at_quarter = contrast_of(noise, "certified at 0.25, sigma 0.5")
    assert at_quarter.difference.values == pytest.approx((-5, -5, -5))
    beyond = contrast_of(noise, "certified at 1, sigma 0.5 minus 0.25")
    assert beyond.difference.values == (0, 0, 0)  # 55 - 64 < 0, and out of reach
    assert denoiser.contrasts[0].difference.values == pytest.approx((10, 10, 10))
    at_one = contrast_of(denoiser, "certified at 1, best sigma")
    assert at_one.difference.values == (0, 0, 0)  # nothing is left there, whatever sigma
    said = [contrast.verdict for contrast in tuning.contrasts]
    found = ["reproduced", "reproduced", "not decided"]  # at radius 1 nothing is left
    assert said == [*found, "reproduced", "reproduced", "not decided", "a difference"]
    assert steps.contrasts[0].difference.values == pytest.approx((-8, -8, -8))
    assert flow.contrasts[0].verdict == "reproduced"
    assert flow.table["sigma 0.5, one pass"]["single draws"].mean == pytest.approx(55)
    first = regimes.contrasts[0].difference
    assert first.values == pytest.approx((10, 10, 10))  # 20 of 200 items
    whole = contrast_of(regimes, "single draws, sigma 0.5: trained on the whole schedule minus 0.5")
    assert whole.difference.values == pytest.approx((25, 25.5, 26))


def test_figures_that_were_not_counted_are_refused(lines):
    with pytest.raises(ValueError, match="was not counted"):
        findings.values(runs.Lines(lines), "plain-050", 0.3)
    missing = [line for line in lines if (line["seed"], line.get("certificate")) != (1, "bare-050")]
    with pytest.raises(ValueError, match="does not have one line for each of the seeds"):
        findings.values(runs.Lines(missing), "bare-050", 0.5)


def test_the_page_does_not_depend_on_the_order_of_lines(lines):
    text = page.render(lines)
    assert "- Denoiser: **reproduced**" in text
    assert "radii up to 2.20 sigma and 1.26 sigma" in text  # rounded down
    assert text == page.render(lines[::-1])
    assert page.page.svg(page.draw(lines)).count("<svg") == 1


def test_runs_that_are_not_finished_are_named(tmp_path):
    with pytest.raises(CasemateError, match=r"train\.main-\w+ is not finished; add --run"):
        denoised.collect(tmp_path, 0)


def test_the_stored_page_is_that_of_the_stored_counts():
    results = ROOT / "notebooks" / "results"
    lines = runs.read(results / "denoised.jsonl")
    assert page.render(lines) == (results / "denoised.md").read_text()
    certificates = {line["certificate"] for line in lines if "certificate" in line}
    assert certificates == {*denoised.base_recipe(0).certify} | ADDED


def test_the_command_says_in_one_line_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["denoised", "--storage", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        runs.command(denoised.STUDY, description=None)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "is not finished; add --run" in said
