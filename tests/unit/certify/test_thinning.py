"""Votes of a coarser stride taken from finer ones: the same ablations, the same certificate."""

import json

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from components.certify.certificate import write_certificate
from components.certify.header import VotesHeader
from components.certify.patch.thinning import positions_among, thin_votes
from components.certify.verify import recertify, verify
from components.certify.vote_rows import VoteRow
from components.certify.votes import read_votes, write_votes
from components.core.errors import CasemateError
from components.data.ablation import KINDS, Ablations

SIZE, NUM_ITEMS, NUM_CLASSES = (9, 12), 5, 3


@st.composite
def pairs_of_sets(draw):
    """Two sets of ablations that differ in the stride; strides that do not divide the side too."""
    image_size = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    side = st.integers(1, min(image_size))
    kind, band = draw(st.sampled_from(KINDS)), draw(side)
    strides = draw(side), draw(side)
    return [
        Ablations(kind=kind, image_size=image_size, band=band, stride=stride) for stride in strides
    ]


@settings(max_examples=150)
@given(pairs_of_sets())
def test_positions_name_the_very_masks_or_there_are_none(drawn):
    coarse, fine = drawn
    kept = {mask.numpy().tobytes() for mask in fine.masks()}
    starts = [
        (set(coarse.starts(side)), set(fine.starts(side)))
        for family in fine.families
        for side in family
    ]
    if all(few <= many for few, many in starts):
        positions = positions_among(coarse, fine)
        assert torch.equal(fine.masks()[torch.from_numpy(positions)], coarse.masks())
    else:
        assume(fine.band < min(fine.image_size))  # else every mask shows everything
        assert not {mask.numpy().tobytes() for mask in coarse.masks()} <= kept
        with pytest.raises(CasemateError, match=r"certify\.stride"):
            positions_among(coarse, fine)


@settings(max_examples=60)
@given(st.sampled_from(KINDS), st.integers(1, 9), st.integers(1, 4), st.integers(1, 9))
def test_a_stride_that_divides_another_always_holds_its_ablations(kind, finer, factor, band):
    assume(finer * factor <= min(SIZE))
    fine = Ablations(kind=kind, image_size=SIZE, band=band, stride=finer)
    coarse = Ablations(kind=kind, image_size=SIZE, band=band, stride=finer * factor)
    assert len(positions_among(coarse, fine)) == len(coarse)


def header_of(kind="columns", *, stride, **settings):
    height, width = SIZE
    return {
        "kind": kind, "run_id": "made", "model_digest": "m", "dataset_digest": "d",
        "num_classes": NUM_CLASSES, "image": {"channels": 1, "height": height, "width": width},
        "settings": {"band": 2, "stride": stride, "micro_batch": 8, **settings},
        "noise_impl": None, "num_items": NUM_ITEMS, "software": {},
    }  # fmt: skip


def rows_of(header, predictions):
    return [
        VoteRow(f"item-{i}", 1, "0" * 64, header["kind"], 0, len(votes), votes)
        for i, votes in enumerate(predictions)
    ]


def fine_votes(folder, kind="columns", *, stride=1):
    """Mostly class 1, as a good model votes."""
    header = header_of(kind, stride=stride)
    ablations = Ablations(kind=kind, image_size=SIZE, band=2, stride=stride)
    drawn = np.random.default_rng(0).random((NUM_ITEMS, len(ablations)))
    predictions = np.where(drawn < 0.85, 1, (10 * drawn).astype(int) % NUM_CLASSES)
    folder.mkdir()
    rows = rows_of(header, predictions.astype(np.uint16))
    return write_votes(folder / "votes.parquet", rows, header), predictions


@pytest.mark.parametrize("kind", KINDS)
def test_a_thinned_certificate_is_that_of_its_own_stride(tmp_path, kind):
    votes, predictions = fine_votes(tmp_path / "fine", kind)
    claim = {"patch_sizes": [1, 2], "rule": "count", "second_rule": "loc"}
    documents = []
    fine = Ablations(kind=kind, image_size=SIZE, band=2, stride=1).masks()
    chosen = [
        next(k for k, other in enumerate(fine)
             if torch.equal(other, mask))
        for mask in Ablations(kind=kind, image_size=SIZE, band=2, stride=4).masks()
    ]  # fmt: skip
    for name in ("thinned", "voted"):
        folder = tmp_path / name
        folder.mkdir()
        asked = {"asked_stride": 1} if name == "thinned" else {}
        header = header_of(kind, stride=4, **asked)
        rows = (
            thin_votes(votes, VotesHeader.from_dict(header))
            if name == "thinned"
            else rows_of(header, predictions[:, chosen].astype(np.uint16))
        )
        written = write_votes(folder / "votes.parquet", rows, header)
        documents.append(write_certificate(folder, written, claim))
        assert verify(folder).problems == []
    thinned, voted = documents
    assert thinned.summary == voted.summary
    assert thinned.summary["standard_accuracy"]["value"] > 0.5
    for name in ("votes", "certificates"):  # equal rows; the header says how they were asked
        ours, theirs = (read_rows(tmp_path / f / f"{name}.parquet") for f in ("thinned", "voted"))
        assert ours == theirs
    assert thinned.evidence.settings["asked_stride"] == 1
    again = recertify(tmp_path / "thinned", tmp_path / "again", patch_sizes=[3])
    assert [entry["patch_size"] for entry in again.summary["certified"]] == [3]


def read_rows(path):
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()


def test_votes_that_do_not_hold_the_stride_are_refused(tmp_path):
    votes, _ = fine_votes(tmp_path / "fine", stride=2)
    for changes, said in (
        ({"stride": 3, "asked_stride": 2}, "certify.stride: 3"),
        ({"stride": 4, "asked_stride": 1}, "another model, dataset or setting"),
        ({"stride": 4, "asked_stride": 2, "micro_batch": 9}, "another model"),
    ):
        with pytest.raises(CasemateError) as caught:
            list(thin_votes(votes, VotesHeader.from_dict(header_of(**changes))))
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
    other = {**header_of(stride=4, asked_stride=2), "model_digest": "another"}
    with pytest.raises(CasemateError, match="another model"):
        list(thin_votes(votes, VotesHeader.from_dict(other)))


@pytest.mark.parametrize("asked", [3, 0, 13, True])
def test_headers_with_an_asked_stride_that_means_nothing_are_refused(tmp_path, asked):
    votes, _ = fine_votes(tmp_path / "fine")
    header = header_of(stride=4, asked_stride=1)
    rows = list(thin_votes(votes, VotesHeader.from_dict(header)))
    header["settings"]["asked_stride"] = asked
    with pytest.raises(CasemateError, match="impossible settings"):
        write_votes(tmp_path / "votes.parquet", rows, header)


def test_the_stride_that_was_asked_survives_the_file(tmp_path):
    votes, _ = fine_votes(tmp_path / "fine")
    header = header_of(stride=3, asked_stride=1)
    write_votes(
        tmp_path / "votes.parquet", thin_votes(votes, VotesHeader.from_dict(header)), header
    )
    assert json.dumps(
        read_votes(tmp_path / "votes.parquet").header.to_dict(), sort_keys=True
    ) == json.dumps(header, sort_keys=True)
