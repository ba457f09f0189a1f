"""The votes file: whole or refused, and the same bytes for the same votes."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from components.certify.header import VotesHeader
from components.certify.vote_rows import image_digest
from components.certify.votes import check_can_store, read_votes, write_votes
from components.core.errors import CasemateError
from tests.unit.certify.files import write_unchecked


def test_votes_come_back_as_written(tmp_path, gaussian_evidence):
    header, rows = gaussian_evidence
    written = write_votes(tmp_path / "votes.parquet", rows, header)
    votes = read_votes(tmp_path / "votes.parquet")
    assert votes.header.to_dict() == header == written.header.to_dict()
    assert votes.sha256 == written.sha256
    items = list(votes.items())
    assert [item.item_id for item in items] == [f"item-{i}" for i in range(6)]
    for item in items:
        for stream in ("select", "estimate"):
            mine = [r for r in rows if (r.item_id, r.stream) == (item.item_id, stream)]
            expected = np.concatenate([r.predictions for r in sorted(mine, key=lambda r: r.start)])
            assert np.array_equal(item.streams[stream], expected)
            assert (item.label, item.image_sha256) == (mine[0].label, mine[0].image_sha256)


@pytest.mark.parametrize(("num_items", "fits"), [(343_254, True), (343_255, False)])
def test_more_than_a_file_holds_is_refused_before_it_is_drawn(gaussian_evidence, num_items, fits):
    header, _ = gaussian_evidence
    drawn = {**header["settings"], "num_select": 100, "num_estimate": 100_000}
    asked = {**header, "num_items": num_items, "settings": drawn}
    if fits:
        check_can_store(VotesHeader.from_dict(asked))
        return
    with pytest.raises(CasemateError, match=r"num_items: 343255 would make 34,359,8"):
        check_can_store(VotesHeader.from_dict(asked))


def test_bytes_do_not_depend_on_arrival_order(tmp_path, gaussian_evidence):
    header, rows = gaussian_evidence
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    write_votes(tmp_path / "a.parquet", rows, header)
    write_votes(tmp_path / "b.parquet", iter(shuffled), dict(reversed(header.items())))
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet", "b.parquet"]  # no leftovers


def _drop_first(rows):
    return rows[1:]


def _overlap(rows):
    wide = replace(rows[2], start=30, predictions=np.zeros(50, np.uint16))
    return [*rows[:2], wide, *rows[3:]]


def _gap(rows):
    return [*rows[:2], *rows[3:]]


def _short(rows):
    return [replace(rows[0], predictions=rows[0].predictions[:-1]), *rows[1:]]


def _foreign_class(rows):
    return [replace(rows[0], predictions=rows[0].predictions + np.uint16(3)), *rows[1:]]


def _foreign_label(rows):
    return [replace(row, label=3) if row.item_id == "item-0" else row for row in rows]


def _two_labels(rows):
    return [replace(rows[0], label=2), *rows[1:]]


def _two_images(rows):
    return [replace(rows[0], image_sha256="f" * 64), *rows[1:]]


def _foreign_stream(rows):
    return [replace(rows[0], stream="columns"), *rows[1:]]


def _lost_item(rows):
    return [row for row in rows if row.item_id != "item-5"]


def _lost_tail(rows):
    return [row for row in rows if (row.item_id, row.stop) != ("item-5", 100)]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop_first, "incomplete for item item-0"),
        (_overlap, "overlap or duplicate"),
        (_gap, "gap at item item-0"),
        (_short, "has 9 predictions"),
        (_foreign_class, "class outside"),
        (_foreign_label, "class outside"),
        (_two_labels, "two labels"),
        (_two_images, "two images"),
        (_foreign_stream, "stream"),
        (_lost_item, "holds 5 items, its header records 6"),
        (_lost_tail, "incomplete for item item-5"),
    ],
)
@pytest.mark.parametrize("held", [2**21, 30])
def test_votes_that_are_not_whole_are_neither_written_nor_read(
    tmp_path, gaussian_evidence, hold, held, damage, message
):
    header, rows = gaussian_evidence
    hold(held)
    path = tmp_path / "votes.parquet"
    with pytest.raises(CasemateError, match=message) as caught:
        write_votes(path, damage(rows), header)
    assert "votes.parquet" in str(caught.value)
    assert not list(tmp_path.iterdir())

    write_unchecked(path, damage(rows), header)
    with pytest.raises(CasemateError, match=message):
        read_votes(path)


@pytest.mark.parametrize("held", [2**21, 30])
def test_a_row_that_is_stored_twice_is_refused(tmp_path, gaussian_evidence, hold, held):
    header, rows = gaussian_evidence
    hold(held)
    write_unchecked(tmp_path / "votes.parquet", [*rows, rows[3]], header)
    with pytest.raises(CasemateError, match="overlap or duplicate"):
        read_votes(tmp_path / "votes.parquet")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "median"}, "unknown kind"),
        ({"model_digest": None}, "model_digest"),
        ({"num_classes": 1}, "impossible"),
        ({"num_classes": True}, "num_classes"),
        ({"settings": {"sigma": 0.5}}, "settings.num_select"),
        ({"image": {"height": 8, "width": 8}}, "image.channels"),
        (
            {"settings": {"sigma": 0, "num_select": 10, "num_estimate": 100, "run_seed": 0}},
            "impossible",
        ),
    ],
)
def test_headers_that_mean_nothing_are_refused(tmp_path, gaussian_evidence, changes, message):
    header, rows = gaussian_evidence
    with pytest.raises(CasemateError, match=message):
        write_votes(tmp_path / "votes.parquet", rows, header | changes)


@pytest.mark.parametrize("settings", [{"band": 9, "stride": 1}, {"band": 1, "stride": 0}])
def test_bands_must_fit_the_image(tmp_path, columns_evidence, settings):
    header, rows = columns_evidence
    with pytest.raises(CasemateError, match="impossible"):
        write_votes(tmp_path / "votes.parquet", rows, header | {"settings": settings})


def test_truncated_files_are_refused_by_name(columns_folder):
    path = columns_folder / "votes.parquet"
    whole = path.read_bytes()
    for size in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CasemateError, match=r"votes\.parquet is truncated or damaged"):
            read_votes(path)


def test_no_flipped_byte_changes_a_vote(gaussian_folder):
    path = gaussian_folder / "votes.parquet"
    honest = path.read_bytes()
    votes = read_votes(path).source
    column = pq.ParquetFile(path).metadata.row_group(0).column(6)  # predictions
    first = column.dictionary_page_offset or column.data_page_offset
    for offset in range(first, first + column.total_compressed_size):
        data = bytearray(honest)
        data[offset] ^= 1
        path.write_bytes(data)
        found = _table_or_none(path)
        assert found is None or found.equals(votes)  # some bits of a page header mean nothing


def _table_or_none(path):
    try:
        return read_votes(path).source
    except CasemateError:
        return None


def test_other_parquet_files_are_not_votes(columns_folder):
    with pytest.raises(CasemateError, match="not a votes file"):
        read_votes(columns_folder / "certificates.parquet")
    with pytest.raises(CasemateError, match="does not exist"):
        read_votes(columns_folder / "absent.parquet")


def test_empty_cells_are_refused(gaussian_folder):
    path = gaussian_folder / "votes.parquet"
    table = read_votes(path).source
    lists = table.column("predictions").to_pylist()
    lists[0][0] = None
    field = table.schema.field("predictions")
    header = pq.read_schema(path).metadata
    holed = table.set_column(6, field, pa.array(lists, field.type))
    pq.write_table(holed.replace_schema_metadata(header), path)
    with pytest.raises(CasemateError, match="empty cells"):
        read_votes(path)


def test_image_digest_sees_pixels_and_shape():
    image = torch.arange(12, dtype=torch.uint8).reshape(1, 3, 4)
    changed = image.clone()
    changed[0, 0, 0] += 1
    digests = {image_digest(x) for x in (image, changed, image.reshape(1, 4, 3))}
    assert len(digests) == 3
    # contiguity is no part of the image
    assert image_digest(image.transpose(1, 2).contiguous().transpose(1, 2)) == image_digest(image)
    with pytest.raises(ValueError, match="uint8"):
        image_digest(image.float())
