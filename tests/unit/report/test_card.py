"""The model card: badges, missing suites, results that do not verify, both pages."""

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest

from components.data.prepared import PreparedDataset
from components.report.card import figures
from components.report.card.content import Card, build_card
from components.report.card.evidence import Finding, Subject
from components.report.card.figures import Figure, State
from components.report.card.headlines import headlines
from components.report.card.markdown import SHORTENED, markdown
from components.report.card.page import page
from components.report.chapters import headline
from components.report.content import RESULT_KINDS, Accuracy, Fact
from components.report.results import read_certify, read_train
from components.report.wording import TIMES
from pipelines.stages.report.stage import read_results
from tests.e2e.browser import check_page, find_chromium, visit
from tests.unit.report.conftest import CLASSES, DIGESTS, WIDTH

HOSTILE = "<script>|a`*_[x](http://evil.test)\n# no"
SPEC = {"architecture": "tiny_vit", "channels": 1, "image_size": WIDTH, "num_classes": 3}
PROBLEM = "does not verify: item made-003: radius is 0.4, expected 0.2"


@pytest.fixture(scope="module")
def subject(finished) -> Subject:
    trained = read_train("train.main", finished["train.main"])
    facts = (Fact("Recipe", "made-up"),)
    return Subject("main", DIGESTS["main"], SPEC, facts, trained, 26_538, CLASSES, "made")


def found_of(finished, **problems: str) -> list[Finding]:
    """The results of the made-up run about `main`."""
    steps = ("attack.linf", "certify.l2", "certify.patch")
    parts = {step: step.partition(".")[2] for step in steps}
    return [Finding(s, s, finished[s], ("main",), problems.get(parts[s], "")) for s in steps]


@pytest.fixture(scope="module")
def card(finished, subject) -> Card:
    return build_card(subject, found_of(finished))


def tile(card: Card, title: str) -> Figure:
    (found,) = [figure for figure in card.strip if figure.title == title]
    return found


# -- badges


def test_only_a_sound_certificate_that_verifies_is_proven(card, finished):
    proven = [figure for figure in card.suites if figure.badge == "proven"]
    assert len(proven) == 4 + 3  # patch sizes, radii
    assert {figure.source for figure in proven} == {"certify.l2", "certify.patch"}
    others = [figure for figure in card.suites if figure.badge != "proven"]
    assert not any(figure.title.startswith("Certified") and figure.share for figure in others)
    unsound = replace(read_certify("certify.patch", finished["certify.patch"]))
    unsound = replace(unsound, document=replace(unsound.document, sound=False))
    shown = [f for f in figures.certificate_figures(unsound) if f.budget is not None]
    assert {figure.badge for figure in shown} == {"not sound"}
    assert all(figure.note for figure in shown)


@pytest.mark.parametrize(("kind", "state"), product((*RESULT_KINDS, None), get_args(State)))
def test_no_combination_of_kind_and_state_claims_too_much(kind, state):
    share = Accuracy(0.5, 0.4, 0.6, 100)
    try:
        figure = Figure("suite", "title", kind, state, share=share)
    except ValueError:
        assert kind == "proven" or state in figures.WITHOUT_NUMBER
        return
    assert (figure.badge == "proven") == (kind == "proven" and state == "verified")
    assert state not in figures.WITHOUT_NUMBER


def test_proven_shares_are_rounded_down_and_others_to_nearest():
    two_thirds = Accuracy(16 / 24, 0.44, 0.85, 24)
    text = {k: Figure("s", "t", k, "verified", share=two_thirds).text for k in RESULT_KINDS}
    assert text == {"measured": "66.67%", "attacked": "66.67%", "proven": "66.6%"}
    exact = Accuracy(0.57, 0.5, 0.6, 1000)  # 0.57 * 1000 is 569.99... in binary
    assert Figure("s", "t", "proven", "verified", share=exact).text == "57.0%"
    assert Figure("s", "mCE", None, "verified", score=76.66).text == "76.7"


def test_the_headline_is_at_the_challenged_budgets(card):
    patch = tile(card, "Certified patch")  # claimed: sides 1, 2, 3, 4 of 16
    assert (patch.budget, patch.badge) == (2, "proven")
    assert f"2 {TIMES} 2 px, 1.6% of the image" in patch.detail
    radius = tile(card, "Certified l2")  # claimed: 0.1, 0.25, 0.4
    assert radius.budget == 0.25
    assert radius.detail.startswith("l2 radius 0.25, pixels in [0, 1]")
    attack = tile(card, "After 2 attacks")
    assert attack.detail == "l∞, eps 8/255: fgsm, AutoAttack (standard)"
    assert (attack.badge, attack.text) == ("attacked", "65.00%")
    assert tile(card, "Clean accuracy").text == "92.50%"


def without_challenge(challenged):
    return None


def at_another_radius(challenged):
    """Not among the declared radii."""
    return replace(challenged, threat={**challenged.threat, "eps": 0.3})


@pytest.mark.parametrize("changed", [lambda found: found, without_challenge, at_another_radius])
def test_report_and_card_have_one_headline_for_a_certificate(changed, finished):
    dataset = PreparedDataset.open(finished["prepare"])
    results = read_results(dataset, finished)
    certificates = [
        replace(one, challenge=changed(one.challenge) if one.family.threat_name == "l2" else None)
        for one in results.certificates
    ]
    table = headline(replace(results, certificates=tuple(certificates)))
    of_report = {
        (column.title, column.detail, cell)
        for column, cell in zip(table.columns, table.rows[0], strict=True)
        if column.kind == "proven"
    }
    every = [f for one in certificates for f in figures.certificate_figures(one)]
    strip = [f for f in headlines(every) if f.kind == "proven"]
    shown = {(f.title, one.family.budget_words(f.budget), f.share)
             for f in strip for one in certificates if one.name == f.source}  # fmt: skip
    assert len(shown) == len(strip) == 2
    assert of_report == shown


def test_of_several_headlines_the_largest_budget_is_shown(finished, subject):
    results = read_results(PreparedDataset.open(finished["prepare"]), finished)
    (one,) = [c for c in results.certificates if c.family.threat_name == "l2"]
    other = replace(one, name="certify.unchallenged", challenge=None)  # its headline: 0.1
    every = [f for c in (other, one) for f in figures.certificate_figures(c)]
    (tile_,) = [f for f in headlines(every) if f.title == "Certified l2"]
    assert (tile_.budget, tile_.source, tile_.note) == (0.25, one.name, "")


def test_the_best_of_several_certificates_says_so(finished, subject):
    twice = [replace(f, label=f"{f.label}-{n}") for n in (1, 2) for f in found_of(finished)[1:2]]
    best = tile(build_card(subject, twice), "Certified l2")
    assert best.note == "the highest of 2 certificates, chosen on these items"


def test_a_suspect_and_an_unchecked_attack_say_why(finished, subject):
    other = replace(subject, name="standard", digest=DIGESTS["standard"], trained=None)
    one = Finding("attack.linf", "attack.linf", finished["attack.linf"], ("main",))
    (attack,) = [f for f in build_card(other, [one]).suites if f.title.startswith("After")]
    assert attack.state == "verified"
    doubted = replace(one, names=("standard",))
    made = build_card(other, [doubted])
    (attack,) = [f for f in made.suites if f.title.startswith("After")]
    sanity = made.verdicts[0]
    assert attack.state == {"reliable": "verified", "suspect": "suspect"}[sanity.label]
    assert attack.note == "; ".join(sanity.reasons)
    assert "Nothing is proven about this model" in " ".join(made.remarks)


# -- missing and refused


def test_a_model_without_results_reads_not_evaluated_everywhere(subject):
    empty = build_card(replace(subject, trained=None), [])
    assert {figure.badge for figure in (*empty.strip, *empty.suites)} == {"not evaluated"}
    suites = [figure.suite for figure in empty.suites]
    assert len(suites) == len(set(suites))
    assert {"Certificates, patch", "Certificates, l2", "Attacks, l∞"} <= set(suites)
    assert set(figures.OF_SUITE.values()) <= set(suites)
    assert empty.remarks[0] == "No finished result is about this model."
    html, text = page(empty), markdown(empty)
    assert html.count("not evaluated") >= len(suites)
    for suite in suites:
        assert f"| {suite} |  | not evaluated |" in text


def test_suites_that_were_not_run_are_listed_beside_those_that_were(card):
    missing = {figure.suite for figure in card.suites if figure.state == "not evaluated"}
    never = {"Attacks, l2", *figures.OF_SUITE.values(), figures.INTERNALS}
    assert missing == never - {figures.CLEAN}  # clean accuracy is that before the attack
    titles = {figure.title for figure in card.strip if figure.state == "not evaluated"}
    assert {"ImageNet-R", "ImageNet-A", "Shape bias", "mCE"} <= titles


def test_a_certificate_that_does_not_verify_has_no_number_and_a_reason(finished, subject, card):
    spoilt = build_card(subject, found_of(finished, l2=PROBLEM))
    (figure,) = [f for f in spoilt.suites if f.source == "certify.l2"]
    assert (figure.badge, figure.share, figure.note) == ("not verified", None, PROBLEM)
    assert figure.suite == "Certificates, l2"
    assert figure in spoilt.strip
    assert [check.text for check in spoilt.failed] == [f"certify.l2 {PROBLEM}."]
    html, text = page(spoilt), markdown(spoilt)
    assert "1 of 5 checks failed. Do not use these numbers" in html
    assert f'<small class="why">{PROBLEM}</small>' in html
    assert f"- **Failed:** certify.l2 {PROBLEM}." in text
    assert "radii" in {chapter.anchor for chapter in card.chapters}
    assert "radii" not in {chapter.anchor for chapter in spoilt.chapters}
    proven = {f.source for f in spoilt.suites if f.badge == "proven"}
    assert proven == {"certify.patch"}


def test_a_result_that_cannot_be_read_is_not_verified(subject, tmp_path):
    (tmp_path / "certificate.json").write_text("{")
    made = build_card(subject, [Finding("certify.x", "certify.x", tmp_path, ("main",))])
    (figure,) = [f for f in made.suites if f.source == "certify.x"]
    assert figure.badge == "not verified"
    assert figure.note.startswith("cannot be read: certify.x: ")


# -- pages

OWN_SCRIPTS = 1  # hover values of charts


def test_equal_inputs_give_equal_bytes_and_no_request(finished, subject, card):
    again = build_card(subject, found_of(finished))
    assert page(again) == page(card)
    assert markdown(again) == markdown(card)
    html = page(card)
    assert "http://" not in html.replace("http://www.w3.org/", "")
    assert "https://" not in html
    assert html.count("<script") == OWN_SCRIPTS


def test_names_of_others_are_text(subject):
    hostile = Figure("Attacks, l2", HOSTILE, None, "not verified", note=HOSTILE, source=HOSTILE)
    made = build_card(replace(subject, name=HOSTILE, trained=None), [])
    made = replace(made, suites=(hostile,), remarks=(HOSTILE,))
    html, text = page(made), markdown(made)
    assert html.count("<script") == OWN_SCRIPTS
    assert "<script" not in text.replace("\\<script", "")
    (row,) = [line for line in text.splitlines() if "not verified" in line]
    assert row.replace("\\|", "").count("|") == 6  # five cells
    assert "[x](" not in text
    assert "\n# no" not in text


@pytest.mark.parametrize("limit", [200, 999, 2500, 3500])
def test_a_shortened_description_keeps_whole_lines(card, limit):
    whole, cut = markdown(card), markdown(card, limit=limit)
    assert len(cut) <= limit < len(whole)
    assert cut.endswith(f"{SHORTENED}\n")
    lines = cut.removesuffix(f"\n{SHORTENED}\n").splitlines()
    assert lines == whole.splitlines()[: len(lines)]
    assert not lines[-1].startswith(("#", "|---"))
    assert markdown(card, limit=len(whole)) == whole


@pytest.mark.skipif(find_chromium() is None, reason="no chromium on this machine")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "light"), (390, "dark")])
def test_the_card_fits_a_desk_and_a_phone(finished, subject, width, scheme, tmp_path):
    spoilt = build_card(subject, found_of(finished, patch=f"{PROBLEM} {'x' * 150}"))
    (tmp_path / "card.html").write_text(page(spoilt), encoding="utf-8")
    seen = visit(tmp_path / "card.html", width=width, height=900, scheme=scheme)
    charts = sum(len(chapter.charts) for chapter in spoilt.chapters)
    check_page(seen, num_charts=charts)


def test_a_certificate_that_cannot_be_read_is_not_taken_for_one_that_was_never_made():
    """Which threat it was of cannot be told: neither is shown as not evaluated."""
    told = "does not verify: certificate.json is truncated or damaged"
    refused = figures.refused(figures.CERTIFICATES, "l2", "certify.l2", told)
    found = [f for f in headlines([refused]) if f.suite.startswith("Certificates")]
    assert {f.state for f in found} == {"not verified"}
    assert {f.note for f in found} == {told}
    alone = [f for f in headlines([]) if f.suite.startswith("Certificates")]
    assert {f.state for f in alone} == {"not evaluated"}
