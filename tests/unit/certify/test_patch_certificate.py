"""Certificate files of every kind of patch evidence: written, verified, derived again, refused."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.certify.certificate import derive, write_certificate
from components.certify.header import VotesHeader
from components.certify.patch.certificate import ablation_accuracy
from components.certify.patch.early_stop import UNSEEN, certify_partial, voting_order
from components.certify.patch.evidence import ablations_of
from components.certify.patch.rules import certify
from components.certify.verify import recertify, verify
from components.certify.vote_rows import VoteRow
from components.certify.votes import read_votes, stream_sizes, write_votes
from components.core.digests import digest_file
from components.core.errors import CasemateError
from components.data.ablation import KINDS

NUM_ITEMS = 12
COUNT = {"patch_sizes": [1, 2], "rule": "count"}


def make_header(kind, *, side=(6, 8), num_classes=4, **settings):
    known = {"patch_sizes": [1, 2], "rules": ["count"], "order": "bit_reversal"}
    if settings.pop("partial", False):
        settings["stopped_for"] = known
    return {
        "kind": kind,
        "run_id": "run-1",
        "model_digest": "a" * 64,
        "dataset_digest": "b" * 64,
        "num_classes": num_classes,
        "image": {"channels": 1, "height": side[0], "width": side[1]},
        "settings": settings,
        "noise_impl": None,
        "num_items": NUM_ITEMS,
        "software": {},
    }


def make_rows(header, seed=0):
    """Item i votes i % 4, apart from about i in 30 of its votes."""
    rng = np.random.default_rng(seed)
    ((stream, size),) = stream_sizes(VotesHeader.from_dict(header)).items()
    rows = []
    for i in range(header["num_items"]):
        votes = np.full(size, i % 4, dtype=np.uint16)
        odd = rng.random(size) < i / 30
        votes[odd] = rng.integers(0, 4, odd.sum())
        label = i % 4 if i % 5 else (i + 1) % 4
        rows.append(VoteRow(f"item-{i:02d}", label, f"{i:064x}", stream, 0, size, votes))
    return rows


def finish(folder, header, rows, claim):
    folder.mkdir()
    votes = write_votes(folder / "votes.parquet", rows, header)
    return write_certificate(folder, votes, claim)


def edit_document(folder, change):
    path = folder / "certificate.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


GOLDEN = {
    ("count", 1): (
        "eee121cf1e80b5844a35efc8489997fd2f4b2ae744dd0f6ea74607687e5538e3",
        "00e779e47c3e9c04440b23fecac6de77a158317670ba9dc7ce0a1b48540c94ee",
        "f02ba1bc18224c8bf85f0119d6275f170d1ddeb2fbfe3ce3501d627b2189b68e",
    ),
    ("strict", 1): (
        "1bd9b3089eee62206123a033800998ac89c0b3a1004d7b083c0abf38451a0cd5",
        "fc29f8ecda9774aad5af81ae0c5698bcc51f73d5de08dc120e41e9ccc006e6d1",
        "f02ba1bc18224c8bf85f0119d6275f170d1ddeb2fbfe3ce3501d627b2189b68e",
    ),
    ("loc", 1): (
        "2d03fbbdfd2d505e9462be491b82c325fd3a4a9efc753607c3817cbaccec8f2d",
        "efac52b5978eda52ee949f386b3082420f874a3b4da01022d61cde9fb3131776",
        "f02ba1bc18224c8bf85f0119d6275f170d1ddeb2fbfe3ce3501d627b2189b68e",
    ),
    ("loc", 3): (
        "7c549e0d011a78f811b401518e5ff421daeb0176497ded470f9bad346e91ff32",
        "1d05458fc0a0aaf2b4c559af10613b0192bbfba64403d4f596b38853beaac6a6",
        "c693ce297cfc4a3488f8c31d87cc50857ede9b9b96e0c59d68e7eb68add32e3f",
    ),
}


@pytest.mark.parametrize(("rule", "stride"), list(GOLDEN))
def test_column_certificates_keep_their_bytes(tmp_path, rule, stride):
    """Digests of files; verdicts and votes are from before other kinds of ablations existed."""
    settings = {"micro_batch": 64, "device": "cpu", "band": 4, "stride": stride}
    settings |= {"token_policy": "drop", "fill": "black"}
    header = make_header("columns", side=(28, 28), num_classes=10, **settings)
    header |= {"num_items": 20, "software": {"casemate": "0"}}
    size, rows = len(range(0, 28, stride)), []
    for i in range(20):
        votes = np.full(size, i % 10, np.uint16)
        odd = [k for k in range(size) if (k * 7 + i * 3) % 20 < i]
        votes[odd] = [(i + 1 + k % 2) % 10 for k in odd]
        label = i % 10 if i % 6 else (i + 1) % 10
        rows.append(VoteRow(f"test-{i:05d}", label, f"{i:064x}", "columns", 0, size, votes))
    sizes = [1, 2, 3] if stride == 1 else [1, 2]
    finish(tmp_path / "out", header, rows, {"patch_sizes": sizes, "rule": rule})
    names = ("certificate.json", "certificates.parquet", "votes.parquet")
    assert tuple(digest_file(tmp_path / "out" / name) for name in names) == GOLDEN[rule, stride]


@pytest.mark.parametrize(("kind", "stride"), product(KINDS, [1, 3]))
def test_every_kind_of_ablation_is_written_and_verified(tmp_path, kind, stride):
    header = make_header(kind, band=2, stride=stride)
    claim = COUNT | {"second_rule": "loc"}
    document = finish(tmp_path / "out", header, make_rows(header), claim)
    assert document.claim == claim
    assert document.sound is True
    assert verify(tmp_path / "out").problems == []
    rows = pq.read_table(tmp_path / "out" / "certificates.parquet").to_pylist()
    for row in rows:
        assert set(row["certified_patch_sizes"]) <= set(row["certified_patch_sizes_loc"])
    for entry in document.summary["certified"]:
        assert entry["accuracy"]["value"] <= entry["accuracy_loc"]["value"]
        for name, column in (("accuracy", ""), ("accuracy_loc", "_loc")):
            proven = [entry["patch_size"] in r[f"certified_patch_sizes{column}"] for r in rows]
            right = sum(p and r["correct"] for p, r in zip(proven, rows, strict=True))
            assert entry[name]["value"] == right / NUM_ITEMS
    votes = np.stack([row.predictions for row in make_rows(header)])
    labels = np.array([row.label for row in make_rows(header)])
    assert document.summary["ablation_accuracy"]["value"] == (votes == labels[:, None]).mean()


def test_other_settings_are_derived_again_and_the_default_is_written_as_nothing(tmp_path):
    header = make_header("blocks", band=2, stride=1)
    finish(tmp_path / "a", header, make_rows(header), COUNT | {"delta_rule": "exact"})
    document = recertify(tmp_path / "a", tmp_path / "b", second_rule="loc", patch_sizes=[3, 1])
    assert document.claim == {"patch_sizes": [1, 3], "rule": "count", "second_rule": "loc"}
    with pytest.raises(CasemateError, match=r"is already the rule; .* --second-rule none"):
        recertify(tmp_path / "b", tmp_path / "loc", rule="loc")
    assert recertify(tmp_path / "b", tmp_path / "loc", rule="loc", second_rule="none")
    back = recertify(tmp_path / "b", tmp_path / "c", second_rule="none", patch_sizes=[1, 2])
    assert back.claim == COUNT
    for name in ("certificate.json", "certificates.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


def test_the_published_count_is_marked_unsound(tmp_path):
    # width 9, band 2, stride 2: the seam makes a patch of 1 touch 2 bands, the reference says 1
    header = make_header("columns", side=(9, 9), band=2, stride=2)
    finish(tmp_path / "exact", header, make_rows(header), COUNT)
    document = recertify(tmp_path / "exact", tmp_path / "paper", delta_rule="paper_reference")
    assert document.sound is False
    assert document.claim["delta_rule"] == "paper_reference"
    entries = document.summary["certified"]
    assert [(e["num_touched"], e["exact_touched"]) for e in entries] == [(1, 2), (2, 2)]
    exact = json.loads((tmp_path / "exact" / "certificate.json").read_text())
    values = [
        [e["accuracy"]["value"] for e in d["summary"]["certified"]]
        for d in (exact, document.to_dict())
    ]
    assert values[0] < values[1]  # what the published count claims too much
    assert verify(tmp_path / "paper").problems == []
    edit_document(tmp_path / "paper", lambda d: d.update(sound=True))
    assert any("sound is True" in p for p in verify(tmp_path / "paper").problems)


def stopped(header, rows, *, rule="count"):
    """The same votes, each item stopped as soon as sizes 1 and 2 are decided."""
    ablations, result = ablations_of(VotesHeader.from_dict(header)), []
    order = voting_order(len(ablations))
    for row in rows:
        for asked in range(1, len(order) + 1):
            votes = np.full(len(order), UNSEEN, dtype=np.uint16)
            votes[order[:asked]] = row.predictions[order[:asked]]
            found = certify_partial(
                votes[None], ablations, num_classes=4, patch_sizes=[1, 2], rule=rule
            )
            if not found.undecided[0]:
                break
        result.append(replace(row, predictions=votes))
    return result


@pytest.mark.parametrize(("kind", "rule"), product(KINDS, ["count", "loc"]))
def test_stopped_votes_give_the_very_claims_of_all_votes(tmp_path, kind, rule):
    header = make_header(kind, band=1, stride=1, partial=True)
    header["settings"]["stopped_for"]["rules"] = [rule]
    rows = make_rows(header)
    document = finish(
        tmp_path / "out", header, stopped(header, rows, rule=rule), COUNT | {"rule": rule}
    )
    assert verify(tmp_path / "out").problems == []
    assert document.summary["votes_asked"]["value"] < 1
    found = pq.read_table(tmp_path / "out" / "certificates.parquet").to_pylist()
    full = certify(
        np.stack([row.predictions for row in rows]),
        ablations_of(VotesHeader.from_dict(header)),
        num_classes=4,
        patch_sizes=[1, 2],
        rule=rule,
    )
    assert [r["prediction"] for r in found] == full.prediction.tolist()
    sizes = [[m for m, proven in zip((1, 2), row, strict=True) if proven] for row in full.certified]
    assert [r["certified_patch_sizes"] for r in found] == sizes
    for row, margin in zip(found, full.margin, strict=True):
        assert row["margin_low"] <= margin <= row["margin_high"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"patch_sizes": [1, 3]}, "certify.patch_sizes"),
        ({"rule": "loc"}, "certify.rule"),
        ({"rule": "strict"}, "certify.rule"),
        ({"second_rule": "loc"}, "certify.second_rule"),
        ({"delta_rule": "paper_reference"}, "certify.delta_rule"),
    ],
)
def test_recertify_refuses_what_stopped_votes_cannot_answer(tmp_path, changes, key):
    header = make_header("columns", band=1, stride=1, partial=True)
    finish(tmp_path / "in", header, stopped(header, make_rows(header)), COUNT)
    with pytest.raises(CasemateError, match="voting stopped early") as caught:
        recertify(tmp_path / "in", tmp_path / "out", **changes)
    assert caught.value.key == key
    assert not (tmp_path / "out").exists()
    document = recertify(tmp_path / "in", tmp_path / "out", patch_sizes=[2])  # was stopped for it
    assert document.claim["patch_sizes"] == [2]


def test_votes_that_stopped_too_early_or_out_of_order_are_refused(tmp_path):
    header = make_header("columns", band=1, stride=1, partial=True)
    rows = stopped(header, make_rows(header))
    short = rows[3].predictions.copy()
    short[voting_order(8)[2:]] = UNSEEN
    votes = write_votes(
        tmp_path / "votes.parquet",
        [*rows[:3], replace(rows[3], predictions=short), *rows[4:]],
        header,
    )
    with pytest.raises(CasemateError, match="of item item-03 stopped before they decided"):
        derive(votes, **COUNT)
    hole = rows[3].predictions.copy()
    hole[0] = UNSEEN
    with pytest.raises(CasemateError, match="skips ablations"):
        write_votes(tmp_path / "votes.parquet", [replace(rows[3], predictions=hole)], header)
    whole = make_header("columns", band=1, stride=1)
    with pytest.raises(CasemateError, match="class outside"):
        write_votes(tmp_path / "votes.parquet", rows, whole)


@pytest.mark.parametrize(
    "stop",
    [
        {"patch_sizes": [1]},
        {"patch_sizes": [1], "rules": ["count"], "order": "random"},
        {"patch_sizes": [9], "rules": ["count"], "order": "bit_reversal"},
        {"patch_sizes": [1], "rules": ["best"], "order": "bit_reversal"},
        [1],
    ],
)
def test_headers_with_an_early_stop_that_means_nothing_are_refused(tmp_path, stop):
    header = make_header("columns", band=1, stride=1)
    rows = make_rows(header)
    header["settings"]["stopped_for"] = stop
    with pytest.raises(CasemateError, match="impossible settings"):
        write_votes(tmp_path / "votes.parquet", rows, header)


def test_double_masking_has_the_same_files(tmp_path):
    header = make_header("double_masking", side=(8, 8), mask_patch=2, num_masks=2)
    rows = make_rows(header)
    document = finish(tmp_path / "out", header, rows, {"patch_sizes": [1, 2]})
    assert verify(tmp_path / "out").problems == []
    assert (document.threat["kind"], document.sound) == ("patch", True)
    table = pq.read_table(tmp_path / "out" / "certificates.parquet").to_pylist()
    unanimous = [len(set(row.predictions.tolist())) == 1 for row in rows]
    assert [bool(r["certified_patch_sizes"]) for r in table] == unanimous
    assert 0 < sum(unanimous) < NUM_ITEMS
    right = sum(u and r["correct"] for u, r in zip(unanimous, table, strict=True))
    assert [e["accuracy"]["value"] for e in document.summary["certified"]] == [right / 12] * 2
    assert recertify(tmp_path / "out", tmp_path / "b", patch_sizes=[1]).claim == {
        "patch_sizes": [1]
    }
    with pytest.raises(CasemateError, match="3 is larger than the 2 pixels these masks hide"):
        recertify(tmp_path / "out", tmp_path / "c", patch_sizes=[3])
    with pytest.raises(CasemateError, match="rule: count does not apply to double_masking"):
        recertify(tmp_path / "out", tmp_path / "c", rule="count")


@pytest.mark.parametrize(
    ("kind", "settings", "forge"),
    [
        ("blocks", {"band": 2, "stride": 1}, {"certified_patch_sizes": [1, 2]}),
        ("rows", {"band": 1, "stride": 1, "partial": True}, {"margin_low": 99}),
        ("double_masking", {"mask_patch": 2, "num_masks": 2}, {"certified_patch_sizes": [1, 2]}),
    ],
)
def test_forged_claims_are_named(tmp_path, kind, settings, forge):
    header = make_header(kind, side=(8, 8), **settings)
    *rows, last = make_rows(header)
    tied = np.arange(last.stop, dtype=np.uint16) // 2 % 2
    rows = [*rows, replace(last, predictions=tied)]
    if settings.get("partial"):
        rows = stopped(header, rows)
    claim = {"patch_sizes": [1, 2]} if kind == "double_masking" else COUNT
    finish(tmp_path / "out", header, rows, claim)
    path = tmp_path / "out" / "certificates.parquet"
    table = pq.read_table(path)
    forged = table.to_pylist()
    assert forged[-1]["certified_patch_sizes"] == []
    forged[-1] |= forge
    pq.write_table(table.from_pylist(forged, schema=table.schema), path)
    problems = [p for p in verify(tmp_path / "out").problems if p.startswith("item item-11")]
    assert len(problems) >= 2  # once by comparison, once by the audit that shares no code


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"band": 9, "stride": 1}, "certify.band: 9 is larger than the image (8)"),
        ({"band": 2, "stride": 0}, "certify.stride: 0 is not a whole number above 0"),
    ],
)
def test_ablations_must_fit_the_image(tmp_path, settings, line):
    header = make_header("blocks", side=(8, 8), **settings)
    with pytest.raises(CasemateError) as caught:
        write_votes(tmp_path / "votes.parquet", [], header)
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("claim", "key"),
    [
        (COUNT | {"patch_sizes": [7]}, "certify.patch_sizes"),
        (COUNT | {"delta_rule": "printed"}, "certify.delta_rule"),
        (COUNT | {"rule": "loc", "delta_rule": "paper_reference"}, "certify.delta_rule"),
        (COUNT | {"second_rule": "strict"}, "certify.second_rule"),
        (COUNT | {"rule": "loc", "second_rule": "loc"}, "certify.second_rule"),
    ],
)
def test_claims_that_make_no_sense_are_named(tmp_path, claim, key):
    header = make_header("rows", band=2, stride=1)  # 6 rows of 8
    write_votes(tmp_path / "votes.parquet", make_rows(header), header)
    with pytest.raises(CasemateError) as caught:
        derive(read_votes(tmp_path / "votes.parquet"), **claim)
    assert caught.value.key == key


def test_the_interval_of_ablation_accuracy_holds_for_votes_that_move_together():
    # All votes of an item agree: the interval must be that of N coin flips, whatever K is.
    rng, inside = np.random.default_rng(0), 0
    for _ in range(100):
        right = rng.random(40) < 0.8
        votes = np.repeat(np.where(right, 1, 0)[:, None], 30, axis=1)
        found = ablation_accuracy((votes == 1).mean(), 40)
        assert found["value"] == right.mean()
        inside += found["low"] <= 0.8 <= found["high"]
    assert inside >= 95  # 95% of 100; the bound is conservative
    sure = ablation_accuracy(1.0, 40)
    assert sure["high"] == 1.0
    assert sure["low"] == pytest.approx(40 ** (-1 / 40))  # q^N = 0.05 / 2
