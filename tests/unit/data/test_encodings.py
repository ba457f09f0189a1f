"""Stored formats of training images: what is exact, what is kept, and what identifies a dataset."""

import io
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from PIL import Image

from components.core.digests import digest_json
from components.core.errors import CasemateError
from components.core.settings import SettingError, plain
from components.data import encodings
from components.data.encodings import PNG, Encoding, decode_jpeg, encode_png, is_jpeg_of
from components.data.fitting import Fitting
from components.data.prepared import PreparedDataset
from components.data.settings import DataSettings
from components.data.shards import FORMAT, describe_dataset, open_job, plan_shards, write_shard
from components.data.sources.base import Entry
from components.data.sources.folder import open_folder

JPEG = Encoding("jpeg", 95, "4:4:4", encodings.jpeg_decoder())
RAW = Encoding("raw")
SIDE = 24


def picture(seed: int, *, channels: int = 3, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """Smooth colours, as JPEG expects them."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image if channels == 3 else image.convert("L")).reshape(height, width, -1)


def jpeg_of(pixels: np.ndarray, *, mode: str = "RGB", **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze()).convert(mode).save(buffer, format="JPEG", **options)
    return buffer.getvalue()


def pixels_of(content: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image).reshape(image.height, image.width, -1)


# -- one image


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("encoding", [PNG, RAW])
def test_lossless_formats_give_the_pixels_back(encoding, channels):
    pixels = picture(0, channels=channels, height=9, width=14)
    content = encoding.encode(pixels)
    back = encoding.decode(content, channels=channels, height=9, width=14)
    assert np.array_equal(back, pixels)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_decoder_agrees_with_pillow(channels):
    for seed in range(5):
        pixels = picture(seed, channels=channels, height=37, width=51)
        content = JPEG.encode(pixels)
        decoded = JPEG.decode(content, channels=channels, height=37, width=51)
        assert np.array_equal(decoded, pixels_of(content))
        assert 0 < np.abs(decoded.astype(int) - pixels).max() < 12  # lossy, but near


def test_quality_and_colour_resolution_are_those_of_the_record():
    pixels = picture(3)
    with Image.open(io.BytesIO(JPEG.encode(pixels))) as image:
        assert [layer[1:3] for layer in image.layer] == [(1, 1)] * 3  # no subsampling
    assert len(replace(JPEG, quality=50).encode(pixels)) < len(JPEG.encode(pixels))


def test_a_jpeg_of_the_source_is_kept_if_it_has_these_pixels():
    original = jpeg_of(picture(1), quality=70)
    pixels = pixels_of(original)
    assert JPEG.encode(pixels, original=original) == original
    assert JPEG.encode(pixels) != original
    assert PNG.encode(pixels, original=original) == encode_png(pixels)
    brighter = pixels ^ np.uint8(1)
    assert JPEG.encode(brighter, original=original) != original


def test_files_that_the_decoder_reads_in_its_own_way_are_not_kept():
    pixels = picture(2, height=20, width=30)
    rotated = Image.Exif()
    rotated[0x0112] = 6  # the source leaves the rotation to the viewer, the decoder rotates
    files = [
        jpeg_of(pixels, exif=rotated),
        jpeg_of(pixels, mode="CMYK"),
        jpeg_of(pixels)[:-300],
        encode_png(pixels),
    ]
    assert decode_jpeg(files[0], channels=3).shape == (30, 20, 3)
    for content in files:
        assert not is_jpeg_of(content, pixels)
    assert is_jpeg_of(jpeg_of(pixels), pixels_of(jpeg_of(pixels)))


# -- a dataset


class Pictures:
    classes = ("zero", "one")

    def entries(self) -> list[Entry]:
        return [Entry(f"picture-{i}", i % 2, None, str(i)) for i in range(10)]

    def decode(self, entry: Entry) -> np.ndarray:
        return picture(int(entry.locator))


def prepare(folder, encoding: Encoding, source=None) -> PreparedDataset:
    source = source or Pictures()
    entries = source.entries()
    folder.mkdir()
    plans = plan_shards({"train": entries, "test": entries[:3]}, shard_size=4)
    job = open_job(source, entries, folder=folder, fitting=Fitting(), on_error="fail")
    jobs = {"train": replace(job, encoding=encoding), "test": job}
    text = describe_dataset(
        [write_shard(jobs[plan.split], plan) for plan in plans],
        classes=source.classes,
        shape=job.shape,
        split_names=("train", "test"),
        encodings={split: job.encoding for split, job in jobs.items()},
        source={},
    )
    (folder / "dataset.json").write_text(text)
    return PreparedDataset.open(folder)


def test_a_jpeg_split_is_read_as_its_decoder_says_and_test_items_are_exact(tmp_path):
    png, jpeg = prepare(tmp_path / "png", PNG), prepare(tmp_path / "jpeg", JPEG)
    exact, lossy = png.load("train"), jpeg.load("train")
    assert exact.item_ids == lossy.item_ids
    assert torch.equal(exact.labels, lossy.labels)
    for row, pixels in enumerate(lossy.images):
        content = JPEG.encode(exact.images[row].permute(1, 2, 0).numpy())
        assert np.array_equal(pixels.permute(1, 2, 0).numpy(), pixels_of(content))
    assert not torch.equal(exact.images, lossy.images)
    assert torch.equal(png.load("test").images, jpeg.load("test").images)
    assert torch.equal(jpeg.lazy("train").rows(torch.tensor([7, 2])).images, lossy.images[[7, 2]])


def test_raw_is_the_same_dataset_in_other_files(tmp_path):
    png, raw = prepare(tmp_path / "png", PNG), prepare(tmp_path / "raw", RAW)
    assert raw.digest == png.digest
    assert torch.equal(raw.load("train").images, png.load("train").images)
    written = json.loads((tmp_path / "raw" / "dataset.json").read_text())["splits"]
    assert written["train"]["encoding"] == {"format": "raw"}
    assert "encoding" not in written["test"]


def test_the_digest_covers_quality_and_decoder(tmp_path):
    variants = {
        "png": PNG,
        "jpeg": JPEG,
        "quality": replace(JPEG, quality=90),
        "decoder": replace(JPEG, decoder="torchcodec 0.0"),
    }
    found = {}
    for name, encoding in variants.items():
        prepare(tmp_path / name, encoding)
        found[name] = json.loads((tmp_path / name / "dataset.json").read_text())
    assert len({document["digest"] for document in found.values()}) == 4
    assert found["jpeg"]["splits"]["train"]["encoding"] == {
        "format": "jpeg",
        "quality": 95,
        "subsampling": "4:4:4",
        "decoder": encodings.jpeg_decoder(),
    }


def test_another_decoder_is_refused_for_training_images_only(tmp_path):
    prepared = prepare(tmp_path / "old", replace(JPEG, decoder="torchcodec 0.0"))
    with pytest.raises(CasemateError, match=r"for torchcodec 0\.0, here is torchcodec .*again"):
        prepared.load("train")
    assert len(prepared.load("test")) == 3


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ({"format": "jpeg", "quality": 95}, "for an unnamed decoder, here is torchcodec"),
        ({"format": "webp"}, "cannot be used: unknown encoding 'webp'"),
        ({"format": "raw", "speed": 9}, "cannot be used: .*speed"),
        ("jpeg", "cannot be used"),
    ],
)
def test_encodings_that_cannot_be_used_are_one_line(tmp_path, encoding, message):
    prepare(tmp_path / "it", JPEG)
    path = tmp_path / "it" / "dataset.json"
    document = json.loads(path.read_text())
    document["splits"]["train"]["encoding"] = encoding
    path.write_text(json.dumps(document))
    with pytest.raises(CasemateError, match=message):
        PreparedDataset.open(tmp_path / "it").load("train")


def test_png_records_do_not_name_a_format(tmp_path):
    source = Pictures()
    job = open_job(source, source.entries(), folder=tmp_path, fitting=Fitting(), on_error="fail")
    (plan,) = plan_shards({"train": source.entries()}, shard_size=10)
    keys = {replace(job, encoding=encoding).plan_key(plan) for encoding in (PNG, JPEG, RAW)}
    assert len(keys) == 3
    parts = [FORMAT, plan.to_json(), asdict(job.fitting), job.on_error, list(job.shape)]
    assert job.plan_key(plan) == digest_json(parts)  # of records from before there were formats


def test_files_of_a_folder_are_kept(tmp_path):
    kept = {}
    for label in ("a", "b"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for i in range(3):
            content = jpeg_of(picture(i), quality=80)
            (tmp_path / "images" / label / f"{i}.jpg").write_bytes(content)
            kept[f"folder-{label}/{i}.jpg"] = content
    png = tmp_path / "images" / "a" / "3.png"
    png.write_bytes(encode_png(picture(3)))
    source = open_folder(tmp_path / "images")
    dataset = prepare(tmp_path / "out", JPEG, source)
    table = encodings_of(dataset)
    for item_id, content in kept.items():
        assert table[item_id] == content
    assert table["folder-a/3.png"] == JPEG.encode(picture(3))
    rows = dataset.load("train")
    assert np.array_equal(
        rows.images[0].permute(1, 2, 0).numpy(), source.decode(source.entries()[0])
    )


def encodings_of(dataset: PreparedDataset) -> dict[str, bytes]:
    reader = dataset.lazy("train").reader
    tables = [reader._table(number) for number in range(len(reader.shards))]
    return {
        row["item_id"]: row["image"]
        for table in tables
        for row in table.select(["item_id", "image"]).to_pylist()
    }


# -- settings


def test_old_recipes_do_not_know_the_keys():
    values = plain(DataSettings(source="mnist5k"))
    assert not {"train_format", "train_quality"} & values.keys()
    other = plain(DataSettings(source="mnist5k", train_format="jpeg"))
    assert other == {**values, "train_format": "jpeg"}


def test_a_quality_that_would_be_ignored_is_refused():
    with pytest.raises(SettingError, match=r"train_quality: 90 would be ignored .* png"):
        DataSettings(source="mnist5k", train_quality=90)
    assert Encoding.of(DataSettings(source="mnist5k", train_format="raw")) == RAW
    jpeg = DataSettings(source="mnist5k", train_format="jpeg", train_quality=90)
    assert Encoding.of(jpeg) == replace(JPEG, quality=90)


def test_a_missing_decoder_is_one_line(monkeypatch):
    monkeypatch.setattr(encodings, "DECODER", "no-such-decoder")
    with pytest.raises(CasemateError, match="needs no-such-decoder, which is not installed"):
        encodings.jpeg_decoder()
