"""Claims derived from stored votes, as they were recorded: exact to the last bit and byte.

`record.py` says what is recorded and how it is renewed.
"""

import shutil

import pyarrow as pa
import pytest

from tests.golden import adapter
from tests.golden.documents import file_digest, key_paths, read_json
from tests.golden.layout import CERTIFICATES, CLAIMS, KEPT, KEYS, header_keys
from tests.golden.record import RECERTIFIED, claims_record

RECORDED = read_json(CLAIMS)
KEPT_CERTIFICATES = sorted(path.name for path in CERTIFICATES.iterdir())
SAME_PYARROW = RECORDED["pyarrow"] == pa.__version__  # else tables are other bytes


@pytest.fixture(scope="module")
def claims_now(tmp_path_factory):
    return claims_record(tmp_path_factory.mktemp("claims"))


@pytest.mark.parametrize("name", KEPT_CERTIFICATES)
def test_kept_certificates_are_true(name):
    assert adapter.problems_of(CERTIFICATES / name) == []


@pytest.mark.parametrize("name", KEPT_CERTIFICATES)
def test_claims_follow_from_the_kept_votes(name, claims_now):
    assert _comparable(claims_now["derived"][name]) == _comparable(RECORDED["derived"][name])


@pytest.mark.parametrize("name", RECERTIFIED)
def test_other_claims_follow_from_the_kept_votes(name, claims_now):
    assert _comparable(claims_now["recertified"][name]) == _comparable(
        RECORDED["recertified"][name]
    )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("early", {"patch_sizes": [3]}),  # voting stopped before it was decided
        ("early-blocks", {"rule": "count"}),
        ("sequential", {"radii": [0.05]}),
        ("sequential", {"failure_prob": 0.05}),
        ("masks", {"patch_sizes": [2]}),  # no mask hides it
        ("l2", {"radii": [5.0]}),  # no votes could prove it
        ("randomized", {"failure_prob": 0.05}),
        ("l2", {"rule": "loc"}),  # a setting of another kind
        ("rows", {"failure_prob": 0.1}),
        ("rows", {"delta_rule": "paper_reference"}),
        ("columns-b2-s1", {"patch_sizes": [9]}),
    ],
)
def test_claims_that_votes_cannot_answer_are_refused(name, changes, tmp_path):
    (field,) = changes
    with pytest.raises(adapter.Refusal, match=f"certify.{field}"):
        adapter.derive_again(CERTIFICATES / name, tmp_path / "out", changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not SAME_PYARROW, reason="another pyarrow writes other bytes")
@pytest.mark.parametrize("name", KEPT_CERTIFICATES)
def test_files_are_written_byte_for_byte(name, tmp_path):
    kept = CERTIFICATES / name
    shutil.copy(kept / "votes.parquet", tmp_path)
    adapter.derive(tmp_path, read_json(kept / "certificate.json")["claim"])
    adapter.rewrite_votes(kept / "votes.parquet", tmp_path / "votes.parquet")
    for file in KEPT:
        assert file_digest(tmp_path / file) == file_digest(kept / file), file


def test_headers_and_documents_keep_their_keys():
    recorded = {file: entry["keys"] for entry in read_json(KEYS) for file in entry["files"]}
    for name in KEPT_CERTIFICATES:
        folder, step = CERTIFICATES / name, f"golden/certify.{name}"
        document = key_paths(read_json(folder / "certificate.json"))
        assert document == recorded[f"{step}/certificate.json"]
        for file in ("votes.parquet", "certificates.parquet"):
            assert header_keys(folder / file) == recorded[f"{step}/{file}"]


def _comparable(claimed):
    return claimed if SAME_PYARROW else {k: v for k, v in claimed.items() if k != "bytes"}
