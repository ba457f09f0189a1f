"""Datasets of an attacker: archives, arrays and images that lie, run code or fill the memory."""

import gzip
import io
import json
import os
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, features

from components.core.digests import digest_file
from components.data.corruptions.textures import load_textures
from components.data.encodings import encode_png
from components.data.prepared import PreparedDataset
from components.data.sources import open_source
from components.data.sources.archives import members
from components.data.sources.files import decode_image_bytes, decode_image_file
from components.data.sources.versions import file_version
from tests.unit.hostile.attacks import (
    DEEP,
    NAMES,
    QUITE_DEEP,
    Payload,
    npy,
    npy_header,
    npz,
    refusal,
    tar,
)

LABELS = np.array([0, 1], np.int64)
IMAGES = np.zeros((2, 4, 4), np.uint8)


# -- arrays


@pytest.mark.parametrize("key", ["images", "labels", "classes"])
@pytest.mark.parametrize(
    "content",
    [
        npy(np.array([Payload(), Payload()], object)),  # a pickle
        npy_header("|u1", (10**15, 4, 4)),  # an exabyte, of which nothing is there
        npy_header("<i8", (2**62,)),
        npy_header("<U1000000000", (2,)),
        npy_header("|u1", (-1, 4, 4)),
        b"\x93NUMPY\x03\x00" + struct.pack("<I", 2**32 - 1),
        b"\x93NUMPY\x01\x00" + struct.pack("<H", 40) + b"__import__('os')".ljust(40),
        b"not an array", b"",
    ],
    ids=str,
)  # fmt: skip
def test_arrays_that_lie_or_hold_objects(tmp_path, key, content):
    arrays = {"images": npy(IMAGES), "labels": npy(LABELS), "classes": npy(np.array(["a", "b"]))}
    path = npz(tmp_path / "x.npz", {**arrays, key: content})
    refusal(lambda: open_source("npz", path=str(path)), f"data.path: {path}")


def test_arrays_that_unpack_to_gigabytes(tmp_path):
    """300 kilobytes of labels stand for 300 megabytes; a declared gigabyte is as bad."""
    bomb = npy_header("|i1", (3 * 10**8,)) + bytes(3 * 10**8)
    path = npz(tmp_path / "x.npz", {"images": npy_header("|u1", (3 * 10**8, 1, 1)), "labels": bomb})
    refusal(lambda: open_source("npz", path=str(path)), "[images] is uint8 (300", "of which it has")
    path = npz(tmp_path / "y.npz", {"images": npy(IMAGES), "labels": bomb})
    refusal(lambda: open_source("npz", path=str(path)), "[labels] would unpack")


def test_idx_files_that_unpack_to_gigabytes_or_claim_to(tmp_path):
    for prefix, count in (("train", 2**31), ("t10k", 1)):
        content = bytes([0, 0, 8, 1]) + struct.pack(">I", count)
        (tmp_path / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(content))
        images = bytes([0, 0, 8, 3]) + struct.pack(">3I", count, 4, 4)
        (tmp_path / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    refusal(lambda: open_source("mnist", path=str(tmp_path)).entries(), "would unpack")


# -- archives


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
)
def test_only_files_of_an_archive_are_listed(tmp_path, kind):
    path = tar(tmp_path / "a.tar", ("link.png", kind, b""), ("a.png", tarfile.REGTYPE, b"data"))
    assert [member.name for member in members(path, file_version(path))] == ["a.png"]


@pytest.mark.parametrize("name", ["../../escape.png", "/etc/escape.png"])
def test_nothing_is_unpacked(tmp_path, name):
    """Members are read where they are in the archive: their names are never paths."""
    path = tar(tmp_path / "a.tar", (name, tarfile.REGTYPE, b"data"))
    before = sorted(tmp_path.parent.rglob("*"))
    (found,) = members(path, file_version(path))
    assert found.name.strip("/").endswith(name.strip("/"))
    assert sorted(tmp_path.parent.rglob("*")) == before


def _changed(path: Path, start: int, field: bytes, *, header: int = 0) -> None:
    """Write a field of a member's header, with the right checksum."""
    content = bytearray(path.read_bytes())
    block = content[header : header + 512]
    block[start : start + len(field)] = field
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    content[header : header + 512] = block
    path.write_bytes(content)


@pytest.mark.parametrize(
    "size",
    [
        b"77777777777\0", b"\x80" + b"\xff" * 11, b"\xff" * 11 + b"\x00", b"\xff" * 12,
        b"\xff" * 10 + b"\xfe\x00", b"-0000001000\0", b"abc\0\0\0\0\0\0\0\0\0",
    ],
)  # fmt: skip
@pytest.mark.timeout(60)
def test_members_that_lie_about_their_size(tmp_path, size):
    path = tar(tmp_path / "a.tar", ("a.png", tarfile.REGTYPE, b"d" * 600))
    _changed(path, 124, size)
    refusal(lambda: members(path, file_version(path)), "is not a whole tar archive")


@pytest.mark.timeout(60)
def test_a_member_that_is_followed_by_itself(tmp_path):
    path = tar(tmp_path / "a.tar", *[("a.png", tarfile.REGTYPE, b"d" * 512)] * 2)
    _changed(path, 124, b"\xff" * 10 + b"\xfe\x00", header=1024)  # -512 bytes
    refusal(lambda: members(path, file_version(path)), "a.png has -512 bytes")


@pytest.mark.timeout(60)
def test_headers_before_headers_without_end(tmp_path):
    chain = [("././@LongLink", tarfile.GNUTYPE_LONGNAME, b"n\0")] * 5000
    path = tar(tmp_path / "a.tar", *chain, ("a.png", tarfile.REGTYPE, b"data"))
    refusal(lambda: members(path, file_version(path)), "is not a whole tar archive")


def test_a_sparse_member_that_stands_for_a_terabyte(tmp_path):
    path = tar(tmp_path / "a.tar", ("a.png", tarfile.GNUTYPE_SPARSE, b"d" * 600))
    _changed(path, 483, b"%011o\0" % 2**32)  # its size when unpacked
    refusal(lambda: members(path, file_version(path)), "is not a whole tar archive")


# -- images


def _chunk(kind: bytes, content: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + check


def png(width: int, height: int, body: bytes = b"", extra: bytes = b"") -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = _chunk(b"IHDR", head) + extra + _chunk(b"IDAT", zlib.compress(body))
    return b"\x89PNG\r\n\x1a\n" + parts + _chunk(b"IEND", b"")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n(touch x) run\n"
SMALL = encode_png(np.zeros((4, 4, 3), np.uint8))
HOSTILE_IMAGES = {
    "bomb": png(60_000, 60_000, bytes(10**6)),
    "huge": png(2**31 - 1, 2**31 - 1),
    "no pixels": png(0, 0),
    "text bomb": png(4, 4, extra=_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(2**27)))),
    "truncated": SMALL[: len(SMALL) // 2],
    "wrong start": b"GIF89a" + SMALL[6:],
    "empty": b"",
    "html": b"<svg onload=alert(1)>",
    "postscript": EPS,  # Pillow would hand it to Ghostscript
    "psd": b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 30_000, 30_000, 8, 3) + bytes(20),
    "gif of one frame": b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\x80\0\0" + bytes(6),
    "tiff loop": b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_IMAGES)
def test_images(tmp_path, monkeypatch, name):
    called = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *words: called.append(words))
    path = tmp_path / "a.png"
    path.write_bytes(HOSTILE_IMAGES[name])
    refusal(lambda: decode_image_file(path), f"data.path: {path} is not a readable image")
    assert not called


def test_every_allowed_format_is_read():
    kinds = ["BMP", "DIB", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF"]  # MPO is read as JPEG
    for kind in [*kinds, *(["WEBP"] if features.check("webp") else [])]:
        file = io.BytesIO()
        Image.new("RGB", (4, 4), (9, 9, 9)).save(file, kind)
        assert decode_image_bytes(file.getvalue(), where="x").shape == (4, 4, 3)


def test_pipes_and_devices_are_not_images(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    for name in ("pipe.png", "zero.png"):
        refusal(lambda name=name: decode_image_file(tmp_path / name), "is not a regular file")


@pytest.mark.parametrize("name", ["bomb", "postscript", "truncated"])
def test_textures(tmp_path, name):
    for number in range(1, 6):
        (tmp_path / f"frost{number}.png").write_bytes(HOSTILE_IMAGES[name])
    refusal(lambda: load_textures(str(tmp_path)), "corruptions.textures: ")


# -- prepared datasets


def _prepared(folder: Path, *, file: str = "test-0.parquet", **changes: object) -> Path:
    """A dataset.json that lists one shard."""
    path = folder / file
    shard = {"file": file, "sha256": digest_file(path) if path.is_file() else "0" * 64}
    split = {"num_items": 2, "shards": [{**shard, "num_items": 2}], "height": 4, "width": 4}
    document = {
        "format": "casemate-dataset/1", "classes": ["a", "b"], "channels": 3, "height": 4,
        "width": 4, "digest": "0" * 64, "splits": {"test": split}, **changes,
    }  # fmt: skip
    (folder / "dataset.json").write_text(json.dumps(document))
    return folder


def _shard(folder: Path, images: list[bytes]) -> Path:
    ids = [f"i{number}" for number in range(len(images))]
    table = pa.table({"item_id": ids, "image": images, "label": [0] * len(images)})
    pq.write_table(table, folder / "test-0.parquet")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_shards_outside_of_the_dataset(tmp_path, name):
    refusal(lambda: PreparedDataset.open(_prepared(tmp_path, file=name)), "is not below its folder")


@pytest.mark.parametrize(
    "changes",
    [
        {"splits": []}, {"splits": {"test": 5}}, {"splits": {"test": {"shards": [{}]}}},
        {"height": 10**9}, {"channels": -1}, {"width": "4"}, {"classes": 5}, {"format": 9},
    ],
    ids=str,
)  # fmt: skip
def test_dataset_json(tmp_path, changes):
    refusal(lambda: PreparedDataset.open(_prepared(tmp_path, **changes)), "dataset: ")


@pytest.mark.parametrize("content", [DEEP, QUITE_DEEP, b"\xff", b"[]", b"1" * 5000])
def test_dataset_json_that_is_none(tmp_path, content):
    (tmp_path / "dataset.json").write_bytes(content)
    refusal(lambda: PreparedDataset.open(tmp_path), "dataset: ")


@pytest.mark.parametrize("name", ["bomb", "truncated", "postscript", "other size"])
def test_images_in_shards(tmp_path, name):
    other = encode_png(np.zeros((5, 4, 3), np.uint8))
    images = [HOSTILE_IMAGES.get(name, other), SMALL]
    dataset = PreparedDataset.open(_prepared(_shard(tmp_path, images)))
    refusal(lambda: dataset.load("test"), "i0 is ", "prepare again")


@pytest.mark.parametrize("content", [b"PAR1" + bytes(20) + b"PAR1", b"", SMALL])
def test_shards_that_are_no_parquet(tmp_path, content):
    (tmp_path / "test-0.parquet").write_bytes(content)
    dataset = PreparedDataset.open(_prepared(tmp_path))
    refusal(lambda: dataset.load("test"), "test-0.parquet is damaged")
