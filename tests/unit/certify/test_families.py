"""Every kind of certificate has a family that answers every question, and headers round-trip."""

import inspect
import json

import numpy as np
import pytest

from components.certify import CLAIMS
from components.certify.certificate import CertificateDocument, check_claim, write_certificate
from components.certify.family import CertificateFamily
from components.certify.header import VotesHeader
from components.certify.registry import FAMILIES, family_of
from components.certify.vote_rows import VoteRow
from components.certify.votes import HEADER_KEY, read_votes, write_votes
from components.core.digests import canonical_json
from components.core.registry import load_reference
from components.core.tables import read_table

PATCH_ENTRY = {"patch_size": 5, "accuracy": {"value": 0.5}}
L2_ENTRY = {"radius": 0.5, "accuracy": {"value": 0.5}}
WORDS = {  # kind: (entry, headline, metric, vote unit)
    **dict.fromkeys(
        ("columns", "rows", "blocks", "both", "double_masking"),
        (PATCH_ENTRY, "patch 5px", "accuracy_at_5", "pass"),
    ),
    "gaussian": (L2_ENTRY, "l2 0.5", "accuracy_at_0.50", "draw"),
}
EVIDENCE = {
    **{key: {"band": 2, "stride": 1} for key in ("columns", "rows", "blocks", "both")},
    "double_masking": {"mask_patch": 2, "num_masks": 2},
    "gaussian": {"sigma": 0.5, "num_select": 4, "num_estimate": 40, "run_seed": 0},
}
CLAIM = {
    **{
        key: {"patch_sizes": [2, 1], "rule": "count"}
        for key in ("columns", "rows", "blocks", "both")
    },
    "double_masking": {"patch_sizes": [1]},
    "gaussian": {"failure_prob": 0.01, "radii": [0.25]},
}


def header_of(kind, **others):
    return {
        "kind": kind, "run_id": "r", "model_digest": "m", "dataset_digest": "d", "num_classes": 3,
        "image": {"channels": 1, "height": 8, "width": 8}, "settings": EVIDENCE[kind],
        "noise_impl": "certv1-philox-numpy" if kind == "gaussian" else None, "num_items": 2,
        "software": {"numpy": "1"}, **others,
    }  # fmt: skip


def rows_of(header):
    sizes = family_of(header["kind"]).streams(VotesHeader.from_dict(header))
    return [
        VoteRow(f"item-{i}", 1, "0" * 64, stream, 0, size, np.full(size, i, np.uint16))
        for i in range(2)
        for stream, size in sizes.items()
    ]


def test_the_kinds_are_those_of_the_registry():
    assert set(WORDS) == set(FAMILIES)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_answers_every_question(kind):
    family = family_of(kind)
    assert isinstance(family, CertificateFamily)
    assert not inspect.isabstract(type(family))
    assert kind in family.kinds
    assert family.claim_class in CLAIMS
    assert set(family.claim_class.help) == set(family.claim_class.names())
    assert set(family.claim_class.names()) <= set(
        inspect.signature(FAMILIES[kind].settings).parameters
    )
    entry, headline, metric, unit = WORDS[kind]
    summary = {"standard_accuracy": {"value": 1.0}, "certified": [entry]}
    assert family.budget_text(entry) == headline
    assert family.metrics(summary) == {"standard_accuracy": 1.0, metric: 0.5}
    assert family.vote_unit == unit
    assert headline.startswith(family.threat_name)
    assert callable(load_reference(family.chapter))  # import-linter does not see these names
    assert family.shares(entry) == {"": {"value": 0.5}}


@pytest.mark.parametrize("kind", FAMILIES)
def test_headers_and_documents_come_back_byte_for_byte(kind, tmp_path):
    header = header_of(kind, of_another_version={"b": [1, 2.5], "a": None})
    votes = write_votes(tmp_path / "votes.parquet", rows_of(header), header)
    stored = read_table(tmp_path / "votes.parquet").schema.metadata[HEADER_KEY]
    assert stored.decode() == canonical_json(header)
    assert read_votes(tmp_path / "votes.parquet").header == votes.header
    assert canonical_json(votes.header.to_dict()) == canonical_json(header)
    write_certificate(tmp_path, votes, CLAIM[kind])
    text = (tmp_path / "certificate.json").read_text()
    document = CertificateDocument.from_dict(json.loads(text))
    assert json.dumps(document.to_dict(), indent=2, sort_keys=True) + "\n" == text
    assert check_claim(votes.header, document.claim).to_dict() == document.claim


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_settings_of_votes_can_be_read_back(kind):
    """What a worker is given when votes are repeated writes the record that it came from."""
    settings = {**EVIDENCE[kind], "micro_batch": 4, "device": "cpu"}
    if kind == "gaussian":
        settings["method"] = "fixed"
    else:
        settings |= {"token_policy": "mask", "fill": "black"}
    if kind in ("columns", "rows", "blocks", "both"):
        settings["way"] = {"path": "fast", "precision": "bfloat16", "compiled": False}
        stop = {"patch_sizes": [1, 2], "rules": ["count", "loc"], "order": "bit_reversal"}
        settings["stopped_for"] = stop
    header = VotesHeader.from_dict(header_of(kind) | {"settings": settings})
    assert family_of(kind).vote_settings(header).to_dict() == settings


def test_a_second_rule_has_its_own_share_and_metric():
    entry = {"patch_size": 5, "accuracy": {"value": 0.5}, "accuracy_loc": {"value": 0.75}}
    family = family_of("rows")
    assert family.shares(entry) == {"": {"value": 0.5}, "loc": {"value": 0.75}}
    summary = {"standard_accuracy": {"value": 1.0}, "certified": [entry]}
    assert family.metrics(summary)["accuracy_loc_at_5"] == 0.75
