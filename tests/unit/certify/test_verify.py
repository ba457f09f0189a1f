"""Verify believes nothing: each test forges something and expects to be told where."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.certify.verify import recertify, verify
from components.certify.votes import write_votes
from components.core.digests import digest_file
from components.core.errors import CasemateError

KINDS = ["columns", "gaussian"]


@pytest.fixture(params=KINDS)
def folder(request):
    return request.getfixturevalue(f"{request.param}_folder")


def edit_document(folder, **changes):
    """Change top-level or dotted fields of certificate.json."""
    path = folder / "certificate.json"
    document = json.loads(path.read_text())
    for name, value in changes.items():
        target = document
        *parents, last = name.split("__")
        for parent in parents:
            target = target[parent]
        target[last] = value
    path.write_text(json.dumps(document))


def edit_claims(folder, change):
    """Rewrite certificates.parquet and, like a careful forger, its digest."""
    path = folder / "certificates.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    edit_document(folder, certificates_sha256=digest_file(path))


@pytest.mark.parametrize("name", ["", "certificate.json", "certificates.parquet"])
def test_an_honest_certificate_passes(folder, name):
    report = verify(folder / name)
    assert report.problems == []
    assert report.ok
    assert report.num_items == 6


@pytest.mark.parametrize("rule", ["strict", "loc"])
def test_other_rules_pass_too(columns_folder, tmp_path, rule):
    recertify(columns_folder, tmp_path / "out", rule=rule, patch_sizes=[3, 1, 2])
    assert verify(tmp_path / "out").problems == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("careful", [False, True])
def test_a_flipped_vote(kind, careful, request):
    folder = request.getfixturevalue(f"{kind}_folder")
    header, rows = request.getfixturevalue(f"{kind}_evidence")
    index = next(i for i, r in enumerate(rows) if r.item_id == "item-2" and r.stream != "select")
    flipped = rows[index].predictions.copy()
    flipped[-1] = (flipped[-1] + 1) % 3
    rows[index] = replace(rows[index], predictions=flipped)
    votes = write_votes(folder / "votes.parquet", rows, header)
    if careful:  # a forger who also mends the digest
        edit_document(folder, votes_sha256=votes.sha256)
    problems = verify(folder).problems
    column = "top_votes" if kind == "columns" else "k"
    assert any(p.startswith(f"item item-2: {column} is ") for p in problems)
    assert any("votes_sha256" in p for p in problems) != careful
    assert not any("item-1" in p for p in problems)


def test_a_radius_raised_by_one_bit(gaussian_folder):
    def raise_radius(rows):
        rows[1]["radius"] = math.nextafter(rows[1]["radius"], math.inf)

    edit_claims(gaussian_folder, raise_radius)
    problems = verify(gaussian_folder).problems
    assert len(problems) == 1
    assert problems[0].startswith("item item-1: radius is ")


def test_a_radius_no_draws_could_give(gaussian_folder):
    edit_claims(gaussian_folder, lambda rows: rows[3].update(radius=2.0))
    problems = verify(gaussian_folder).problems
    assert any("item item-3: radius 2.0 exceeds the possible 0.75" in p for p in problems)


@pytest.mark.parametrize(
    ("kind", "column", "value"),
    [
        ("columns", "certified_patch_sizes", [1, 2]),
        ("columns", "margin", 3),
        ("columns", "prediction", 2),
        ("gaussian", "prediction", 1),
        ("gaussian", "abstain", False),
        ("gaussian", "p_lower", 0.75),
        ("gaussian", "radius", math.nan),
    ],
)
def test_any_changed_claim_is_named(kind, column, value, request):
    folder = request.getfixturevalue(f"{kind}_folder")
    edit_claims(folder, lambda rows: rows[4].update({column: value}))
    assert any(p.startswith(f"item item-4: {column} is ") for p in verify(folder).problems)


@pytest.mark.parametrize("column", ["label", "image_sha256", "correct"])
def test_changed_identity_is_named(folder, column):
    value = {"label": 2, "image_sha256": "0" * 64, "correct": True}[column]
    edit_claims(folder, lambda rows: rows[4].update({column: value}))
    assert any(p.startswith(f"item item-4: {column} is ") for p in verify(folder).problems)


def test_a_dropped_claim(folder):
    edit_claims(folder, lambda rows: rows.pop(4))  # the wrong item: accuracy would look better
    assert verify(folder).problems == ["item item-4: has votes but no certificate"]


def test_a_repeated_and_an_invented_claim(folder):
    edit_claims(folder, lambda rows: rows.extend([rows[0], rows[1] | {"item_id": "item-9"}]))
    problems = verify(folder).problems
    assert "certificates.parquet: 1 rows repeat an item" in problems
    assert "item item-9: has a certificate but no votes" in problems


def test_edited_claims_without_a_mended_digest(folder):
    path = folder / "certificates.parquet"
    pq.write_table(pq.read_table(path), path, compression="none")  # same rows, other bytes
    problems = verify(folder).problems
    assert len(problems) == 1
    assert "certificates_sha256" in problems[0]


def test_lost_columns_and_empty_cells(folder):
    path = folder / "certificates.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns("correct"), path)
    assert any("other columns" in p for p in verify(folder).problems)
    rows = table.to_pylist()
    rows[0]["prediction"] = None
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    assert any("empty cells" in p for p in verify(folder).problems)


def test_a_swapped_model_digest_names_both(folder):
    edit_document(folder, evidence__model_digest="c" * 64)
    (problem,) = verify(folder).problems
    assert "evidence.model_digest" in problem
    assert "a" * 64 in problem
    assert "c" * 64 in problem


@pytest.mark.parametrize("kind", KINDS)
def test_votes_of_another_model(kind, request):
    folder = request.getfixturevalue(f"{kind}_folder")
    header, rows = request.getfixturevalue(f"{kind}_evidence")
    write_votes(folder / "votes.parquet", rows, header | {"model_digest": "d" * 64})
    assert any("evidence.model_digest" in p and "d" * 64 in p for p in verify(folder).problems)
    with pytest.raises(CasemateError, match=r"evidence\.model_digest"):
        recertify(folder, folder.parent / "out")


@pytest.mark.parametrize("field", ["sound", "kind", "votes_sha256", "summary", "threat__unit"])
def test_any_changed_field_of_the_document_is_named(folder, field):
    edit_document(folder, **{field: "forged"})
    assert any(field.replace("__", ".") in p for p in verify(folder).problems)


def test_better_accuracies_are_noticed(folder):
    document = json.loads((folder / "certificate.json").read_text())
    document["summary"]["certified"][0]["accuracy"]["value"] = 1.0
    (folder / "certificate.json").write_text(json.dumps(document))
    (problem,) = verify(folder).problems
    assert "summary.certified[0].accuracy.value is 1.0" in problem


def test_a_larger_sigma_than_was_added(gaussian_folder):
    edit_document(gaussian_folder, threat__sigma=1.0)
    assert any("claims sigma 1.0" in p for p in verify(gaussian_folder).problems)


def test_a_looser_failure_probability_claimed_afterwards(gaussian_folder):
    edit_document(gaussian_folder, claim__failure_prob=0.0001)
    assert any("item item-0: radius is" in p for p in verify(gaussian_folder).problems)


def test_unknown_noise_is_named(gaussian_folder, gaussian_evidence):
    header, rows = gaussian_evidence
    write_votes(gaussian_folder / "votes.parquet", rows, header | {"noise_impl": "dice"})
    assert any("noise_impl is 'dice'" in p for p in verify(gaussian_folder).problems)


def test_recount_catches_a_wrong_number_of_touched_bands(columns_folder, monkeypatch):
    # As if the certificate code itself forgot the band: the audit shares nothing with it.
    for module in ("patch.ablations", "patch.certificate"):
        monkeypatch.setattr(f"components.certify.{module}.num_touched", lambda *_, **__: 0)
    problems = verify(columns_folder).problems
    assert "patch size 1: 0 touched bands, sets give 1" in problems


@pytest.mark.parametrize("name", ["votes.parquet", "certificates.parquet", "certificate.json"])
def test_missing_and_truncated_files_raise_by_name(folder, name):
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CasemateError, match=rf"{name} is truncated or damaged"):
        verify(folder)
    path.unlink()
    with pytest.raises(CasemateError, match=rf"{name} does not exist"):
        verify(folder)


def test_a_document_too_deep_to_read_is_damaged(folder):
    (folder / "certificate.json").write_text("[" * 100_000)
    with pytest.raises(CasemateError, match=r"certificate\.json is truncated or damaged"):
        verify(folder)


def test_votes_without_one_block_raise(gaussian_folder):
    path = gaussian_folder / "votes.parquet"
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table.slice(0, 5), table.slice(6)]), path)
    with pytest.raises(CasemateError, match=r"votes\.parquet.*item-1"):
        verify(gaussian_folder)


def test_a_path_without_certificate_raises(tmp_path):
    with pytest.raises(CasemateError, match="is neither a folder with a certificate"):
        verify(tmp_path / "nowhere")
    with pytest.raises(CasemateError, match=r"certificate\.json does not exist"):
        verify(tmp_path)


def test_recertify_keeps_what_is_not_given(gaussian_folder, tmp_path):
    document = recertify(gaussian_folder, tmp_path / "out", failure_prob=0.05)
    assert document.claim == {"failure_prob": 0.05, "radii": [0.25, 0.5]}
    assert verify(tmp_path / "out").problems == []
    old, new = (
        np.array(pq.read_table(f / "certificates.parquet").column("radius"))
        for f in (gaussian_folder, tmp_path / "out")
    )
    assert (new >= old).all()
    assert (new > old).any()  # less certainty, larger radii
    assert verify(gaussian_folder).ok  # the original is untouched


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        ("columns", {"failure_prob": 0.01}, "certify.failure_prob"),
        ("columns", {"radii": [0.5]}, "certify.radii"),
        ("columns", {"patch_sizes": [99]}, "certify.patch_sizes"),
        ("gaussian", {"radii": [10**400]}, "certify.radii"),
        ("gaussian", {"rule": "loc"}, "certify.rule"),
        ("gaussian", {"patch_sizes": [1]}, "certify.patch_sizes"),
        ("gaussian", {"failure_prob": 1e-31}, "certify.num_estimate"),
        ("gaussian", {"failure_prob": 2.0}, "certify.failure_prob"),
    ],
)
def test_recertify_refuses_and_writes_nothing(kind, settings, key, request, tmp_path):
    with pytest.raises(CasemateError) as caught:
        recertify(request.getfixturevalue(f"{kind}_folder"), tmp_path / "out", **settings)
    assert caught.value.key == key
    assert not (tmp_path / "out").exists()


def test_recertify_does_not_overwrite_the_original(folder):
    with pytest.raises(CasemateError, match="choose another folder"):
        recertify(folder / "certificate.json", folder)
