"""l2 certificates by all three methods: derived, checked by a stranger, and derived again."""

import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.certify.certificate import derive, write_certificate
from components.certify.header import VotesHeader
from components.certify.l2.bounds import randomized_lower
from components.certify.l2.claims import registered_uniform
from components.certify.l2.evidence import declare, plan_of
from components.certify.l2.predict import predict_counts
from components.certify.l2.sequential import certify_prefix, choose_class
from components.certify.verify import recertify, verify
from components.certify.vote_rows import VoteRow
from components.certify.votes import read_votes, write_votes
from components.core.errors import CasemateError
from components.core.noise_streams import noise_impl

N0, N, ALPHA, RADII = 40, 600, 0.001, [0.25, 0.5]
TRUTH = [0.995, 0.97, 0.9, 0.6, 0.2, 0.99]  # probability of class 1, the label, per item


def header(method):
    settings = {"sigma": 0.5, "num_select": N0, "num_estimate": N, "run_seed": 3, "method": method}
    if method == "sequential":
        declared = {"look_every": 32, "futility_prob": 0.01, "failure_prob": ALPHA, "radii": RADII}
        settings["declared"] = declare(**declared)
    return {
        "kind": "gaussian", "run_id": "r", "model_digest": "a", "dataset_digest": "d",
        "num_classes": 3, "image": {"channels": 1, "height": 4, "width": 4}, "settings": settings,
        "noise_impl": noise_impl(method), "num_items": len(TRUTH), "software": {},
    }  # fmt: skip


def draws(i):
    rng = np.random.default_rng([7, i])
    return {
        stream: np.where(rng.random(size) < TRUTH[i], 1, 2).astype(np.uint16)
        for stream, size in (("select", N0), ("estimate", N))
    }


def rows_of(method):
    """All draws, or those up to the deciding look, in two blocks."""
    rows = []
    for i in range(len(TRUTH)):
        streams = draws(i)
        if method == "sequential":
            found = choose_class(streams["select"], num_classes=3, num_select=N0)
            claim = certify_prefix(
                streams["estimate"],
                plan_of(VotesHeader.from_dict(header(method))),
                chosen=found.chosen,
            )
            streams = {
                "select": streams["select"][: found.n0],
                "estimate": streams["estimate"][: claim.n],
            }
        for stream, votes in streams.items():
            for low, high in ((0, 20), (20, len(votes))):
                if low < min(high, len(votes)):
                    part = votes[low:high]
                    rows.append(
                        VoteRow(f"item-{i}", 1, "0" * 64, stream, low, low + len(part), part)
                    )
    return rows


@pytest.fixture
def made(tmp_path):
    def finish(method, rows=None):
        folder = tmp_path / method
        folder.mkdir()
        votes = write_votes(folder / "votes.parquet", rows or rows_of(method), header(method))
        write_certificate(folder, votes, {"failure_prob": ALPHA, "radii": RADII})
        return folder

    return finish


def table(folder):
    return pq.read_table(folder / "certificates.parquet").to_pylist()


def summary(folder):
    return json.loads((folder / "certificate.json").read_text())["summary"]


@pytest.mark.parametrize("method", ["fixed", "randomized", "sequential"])
def test_every_method_verifies_and_says_which_it_is(made, method):
    folder = made(method)
    assert verify(folder).problems == []
    found = summary(folder)
    assert found["method"] == method
    assert sum(found["bound_distribution"]["counts"]) == len(TRUTH)
    assert found["num_possible_failures"] == 1  # P(Bin(6, 0.001) > 1) = 1.5e-5, P(> 0) = 6e-3


def test_the_randomised_bound_uses_the_registered_number(made):
    plain, randomised = table(made("fixed")), table(made("randomized"))
    for a, b in zip(plain, randomised, strict=True):
        u = registered_uniform(run_seed=3, item_id=b["item_id"])
        assert b["uniform"] == u
        assert b["p_lower"] == randomized_lower(b["k"], N, ALPHA, uniform=u) >= a["p_lower"]


def test_labels_without_a_radius_come_from_a_fixed_number_of_draws(made):
    folder = made("fixed")
    for i, row in enumerate(table(folder)):
        counts = np.bincount(draws(i)["estimate"], minlength=3)
        assert row["predicted"] == predict_counts(counts, alpha=ALPHA)
    right = np.mean([row["predicted"] == 1 for row in table(folder)])
    assert summary(folder)["prediction_accuracy"]["value"] == right == 5 / 6
    sequential = made("sequential")
    assert "prediction_accuracy" not in summary(sequential)  # its number of draws was not fixed
    assert "predicted" not in table(sequential)[0]


def test_sequential_claims_are_those_of_all_draws_and_cost_less(made):
    folder = made("sequential")
    plan, rows = plan_of(VotesHeader.from_dict(header("sequential"))), table(folder)
    for i, row in enumerate(rows):
        chosen = choose_class(draws(i)["select"], num_classes=3, num_select=N0).chosen
        claim = certify_prefix(draws(i)["estimate"], plan, chosen=chosen)
        assert (row["n"], row["k"], row["radius"]) == (claim.n, claim.k, claim.radius)
    used = [row["n"] for row in rows]
    assert summary(folder)["draws_used"]["total"] == sum(used) < len(TRUTH) * N
    assert summary(folder)["draws_used"]["share"] == sum(used) / (len(TRUTH) * N)
    assert summary(folder)["max_radius"] == plan.max_certifiable_radius
    assert {row["n0"] for row in rows} != {N0}  # clear choices needed fewer selecting draws


def test_headers_of_the_first_version_keep_their_layout(tmp_path):
    old = header("fixed")
    del old["settings"]["method"]
    votes = write_votes(tmp_path / "votes.parquet", rows_of("fixed"), old)
    found, figures = derive(votes, failure_prob=ALPHA, radii=RADII)
    assert found.column_names[6:] == ["n0", "n", "k", "p_lower", "radius"]
    assert set(figures) == {
        "num_items", "standard_accuracy", "abstain_rate", "average_certified_radius",
        "max_radius", "certified",
    }  # fmt: skip
    write_certificate(tmp_path, votes, {"failure_prob": ALPHA, "radii": RADII})
    assert verify(tmp_path).problems == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v: v[:-32], "its radii are not decided"),  # a look too early
        (lambda v: v[:-1], "its radii are not decided"),
        (lambda v: np.append(v, v[:32]), "draws decide"),  # topped up
    ],
)
def test_draws_that_stop_elsewhere_are_refused(made, tmp_path, change, said):
    rows = rows_of("sequential")
    at = max(i for i, r in enumerate(rows) if (r.item_id, r.stream) == ("item-0", "estimate"))
    changed = change(rows[at].predictions)
    rows[at] = replace(rows[at], stop=rows[at].start + len(changed), predictions=changed)
    votes = write_votes(tmp_path / "votes.parquet", rows, header("sequential"))
    with pytest.raises(CasemateError, match=f"item item-0 .*{said}"):
        derive(votes, failure_prob=ALPHA, radii=RADII)


def test_selecting_draws_that_go_on_are_refused(tmp_path):
    rows = [r for r in rows_of("sequential") if (r.item_id, r.stream) != ("item-0", "select")]
    rows.append(VoteRow("item-0", 1, "0" * 64, "select", 0, N0, draws(0)["select"]))
    votes = write_votes(tmp_path / "votes.parquet", rows, header("sequential"))
    with pytest.raises(CasemateError, match="selecting draws"):
        derive(votes, failure_prob=ALPHA, radii=RADII)


def test_fixed_draws_may_not_be_short(tmp_path):
    rows = rows_of("fixed")
    rows[-1] = replace(rows[-1], stop=rows[-1].stop - 1, predictions=rows[-1].predictions[:-1])
    with pytest.raises(CasemateError, match="is incomplete for item item-5"):
        write_votes(tmp_path / "votes.parquet", rows, header("fixed"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "hopeful"}, "method: hopeful is not one of"),
        ({"declared": None}, "must be set iff method is sequential"),
        ({"method": "fixed"}, "must be set iff method is sequential"),
        ({"declared": {"radii": [0.5]}}, "lacks failure_prob"),
        (
            {"declared": {**header("sequential")["settings"]["declared"], "radii": ["a"]}},
            "radii that are not numbers",
        ),
        ({"num_estimate": 12}, "never exceed probability 1/2"),
    ],
)
def test_impossible_headers_are_refused(tmp_path, change, said):
    bad = header("sequential")
    bad["settings"] |= change
    bad["settings"] = {k: v for k, v in bad["settings"].items() if v is not None}
    with pytest.raises(CasemateError, match=said):
        write_votes(tmp_path / "votes.parquet", rows_of("sequential"), bad)


def test_sequential_votes_answer_their_own_question_only(made, tmp_path):
    folder = made("sequential")
    document = recertify(folder, tmp_path / "fewer", radii=[0.5])
    assert [e["radius"] for e in document.summary["certified"]] == [0.5]
    assert verify(tmp_path / "fewer").problems == []
    for changed, key in (({"radii": [0.3]}, "radii"), ({"failure_prob": 0.01}, "failure_prob")):
        with pytest.raises(CasemateError, match="drawing stopped early") as caught:
            recertify(folder, tmp_path / "other", **changed)
        assert caught.value.key == f"certify.{key}"
        assert "\n" not in str(caught.value)


def test_randomised_votes_are_recertified_by_their_own_bound(made, tmp_path):
    document = recertify(made("randomized"), tmp_path / "new", failure_prob=0.01, radii=[0.3])
    assert document.summary["method"] == "randomized"
    assert verify(tmp_path / "new").problems == []
    with pytest.raises(CasemateError, match="randomised"):
        recertify(tmp_path / "new", tmp_path / "loose", failure_prob=0.2)


def test_another_uniform_number_is_found(made):
    folder = made("randomized")
    votes = read_votes(folder / "votes.parquet")
    again = write_votes(
        folder / "votes.parquet",
        rows_of("randomized"),
        votes.header.to_dict() | {"settings": {**votes.header.settings, "run_seed": 4}},
    )
    assert again.sha256 != votes.sha256
    assert any("uniform is" in problem for problem in verify(folder).problems)


@pytest.mark.parametrize("method", ["fixed", "randomized"])
def test_radii_that_no_votes_could_prove_are_not_derived(made, tmp_path, method):
    folder = made(method)
    reach = summary(folder)["max_radius"]
    assert recertify(folder, tmp_path / "in", radii=[reach]).claim["radii"] == [reach]
    beyond = float(np.nextafter(reach, np.inf))
    with pytest.raises(CasemateError, match=r"certify.radii: .* the most that 600 draws of sigma"):
        recertify(folder, tmp_path / "beyond", radii=[0.25, beyond])
    with pytest.raises(CasemateError, match=r"certify.radii: .* at failure_prob 1e-30"):
        recertify(folder, tmp_path / "beyond", failure_prob=1e-30, radii=[reach])
    assert not (tmp_path / "beyond").exists()
