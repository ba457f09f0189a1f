"""Sources below s3://: the same items and bytes as from files, bounded memory, one-line refusals.

Every test reads from a real S3 server in a process of its own.
"""

import gzip
import io
import pickle
import tarfile
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from components.core import object_stores
from components.core.errors import CasemateError
from components.data import places
from components.data.fitting import Fitting
from components.data.places import RemotePath
from components.data.shards import open_job, plan_shards, write_shard
from components.data.sources import archives, npz, open_source, parquet
from components.data.sources.arrays import RangedRows
from components.data.sources.kept import Kept
from components.data.sources.names import imagenet_synsets
from components.data.sources.stamp import source_stamp
from tests.object_server import BUCKET, object_server
from tests.refusals import refusal_of
from tests.serial_shards import shard_bytes, write_serially

WNIDS = imagenet_synsets()[:2]
UPLOAD = "correct the URI or upload the files there"


@pytest.fixture(scope="module")
def server():
    with object_server() as running:
        yield running


def pixels(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape or (6, 6, 3), dtype=np.uint8)


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels(seed)).save(buffer, format="PNG")
    return buffer.getvalue()


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def train_images() -> dict[str, dict[str, bytes]]:
    return {
        wnid: {f"{wnid}_{n}.JPEG": png(20 * label + n) for n in range(15)}
        for label, wnid in enumerate(WNIDS)
    }


def val_images() -> dict[str, bytes]:
    return {f"ILSVRC2012_val_{n:08d}.JPEG": png(100 + n) for n in range(1, 7)}


def write_folder(root: Path) -> tuple[Path, dict]:
    for label, name in enumerate(("cat", "Hünd #2 50%")):
        for number in range(15):
            file = root / name / ("deeper" if number % 2 else "") / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(png(20 * label + number))
    (root / "cat" / ".hidden.png").write_bytes(b"no image")
    return root, {}


def write_parquet(root: Path) -> tuple[Path, dict]:
    root.mkdir()
    for split, count in (("train", 24), ("test", 6)):
        table = pa.table(
            {"image": [png(n) for n in range(count)], "label": [n % 2 for n in range(count)]}
        )
        pq.write_table(table, root / f"{split}-0.parquet", row_group_size=5)
    return root, {}


def write_npz(root: Path) -> tuple[Path, dict]:
    root.mkdir()
    x, y = pixels(0, 30, 6, 6, 3), np.arange(30) % 3
    np.savez(root / "set.npz", x_train=x, y_train=y, x_test=x[:6], y_test=y[:6])
    return root / "set.npz", {}


def write_archives(root: Path) -> tuple[Path, dict]:
    root.mkdir()
    inner = {f"{wnid}.tar": tar_of(files) for wnid, files in train_images().items()}
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar_of(inner))
    (root / "ILSVRC2012_img_val.tar").write_bytes(tar_of(val_images()))
    (root / "val.txt").write_text(
        "".join(f"{n} {WNIDS[i % 2]}\n" for i, n in enumerate(val_images()))
    )
    return root, {"val_map": "val.txt", "subset": True}


KINDS = {
    "folder": write_folder,
    "parquet": write_parquet,
    "npz": write_npz,
    "imagenet": write_archives,
}


def below(path: str, options: dict) -> dict:
    """Options whose map lies beside the data."""
    return options | ({"val_map": f"{path}/val.txt"} if "val_map" in options else {})


def prepared(source, folder: Path) -> tuple[str, dict[str, bytes]]:
    """dataset.json and the shards."""
    return write_serially(source, folder), shard_bytes(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_objects_give_the_items_and_bytes_of_files(server, tmp_path, kind):
    path, options = KINDS[kind](tmp_path / "raw")
    uri = server.upload(path, f"same/{kind}")
    local = open_source(kind, path=str(path), options=below(str(path), options))
    remote = open_source(kind, path=uri, options=below(uri, options))
    assert [(e.item_id, e.label, e.split_hint, e.locator) for e in remote.entries()] == [
        (e.item_id, e.label, e.split_hint, e.locator) for e in local.entries()
    ]
    assert prepared(remote, tmp_path / "remote") == prepared(local, tmp_path / "local")


def write_cifar(root: Path) -> dict:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for number, file in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        batch = {"labels": [number % 2, 1], "data": pixels(number, 2, 3072)}
        (folder / file).write_bytes(pickle.dumps(batch, protocol=2))
    names = {"label_names": [f"c{n}" for n in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names, protocol=2))
    return {}


def write_idx(root: Path) -> dict:
    root.mkdir()
    for prefix in ("train", "t10k"):
        images = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 4]) + pixels(1, 32).tobytes()
        labels = bytes([0, 0, 8, 1, 0, 0, 0, 2, 3, 4])
        (root / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (root / f"{prefix}-labels-idx1-ubyte").write_bytes(labels)
    return {}


def write_cifar_c(root: Path) -> dict:
    root.mkdir()
    np.save(root / "fog.npy", pixels(3, 10, 32, 32, 3))
    np.save(root / "labels.npy", np.arange(10) % 10)
    return {"corruption": "fog", "severity": "all"}


def write_imagenet_r(root: Path) -> dict:
    for wnid in ("n01443537", "n01484850"):
        (root / wnid).mkdir(parents=True)
        (root / wnid / "art_0.jpg").write_bytes(png(4))
    return {"subset": True}


OTHERS = {
    "cifar10": write_cifar,
    "mnist": write_idx,
    "cifar10_c": write_cifar_c,
    "imagenet_r": write_imagenet_r,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_sources_read_objects_too(server, tmp_path, kind):
    options = OTHERS[kind](tmp_path / "raw")
    uri = server.upload(tmp_path / "raw", f"others/{kind}")
    local = open_source(kind, path=str(tmp_path / "raw"), options=options)
    remote = open_source(kind, path=f"{uri}/", options=options)
    items = zip(remote.entries(), local.entries(), strict=True)
    for there, here in items:
        assert (there.item_id, there.label) == (here.item_id, here.label)
        assert np.array_equal(remote.decode(there), local.decode(here))


def test_archives_hold_the_items_of_folders(tmp_path):
    write_archives(tmp_path / "packed")
    for wnid, files in train_images().items():
        (tmp_path / "flat" / "train" / wnid).mkdir(parents=True)
        for name, content in files.items():
            (tmp_path / "flat" / "train" / wnid / name).write_bytes(content)
    (tmp_path / "flat" / "val").mkdir()
    for name, content in val_images().items():
        (tmp_path / "flat" / "val" / name).write_bytes(content)
    options = {"val_map": str(tmp_path / "packed" / "val.txt"), "subset": True}
    opened = [
        open_source("imagenet", path=str(tmp_path / p), options=options) for p in ("packed", "flat")
    ]
    packed, flat = (prepared(source, tmp_path / str(n)) for n, source in enumerate(opened))
    assert packed == flat


# -- memory


def peak_bytes(call) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_rows_of_a_large_array_are_read_one_by_one(server, tmp_path, monkeypatch):
    monkeypatch.setattr(npz, "MAP_FROM", 2**20)
    images = pixels(0, 200, 200, 200, 3)  # 24 MB
    np.savez(tmp_path / "large.npz", images=images, labels=np.arange(200) % 2)
    source = open_source("npz", path=server.upload(tmp_path / "large.npz", "rows"))
    entries = source.entries()
    wanted = [3, 199, 0]
    found: list[np.ndarray] = []
    peak = peak_bytes(lambda: found.extend(source.decode(entries[row]) for row in wanted))
    assert all(np.array_equal(one, images[row]) for one, row in zip(found, wanted, strict=True))
    assert isinstance(npz._read_images(source.path, source.version, "images"), RangedRows)
    # the directory of the archive is read with one request; then rows of 120 kB
    assert peak < npz.READ_AHEAD * 2 + 10 * images[0].nbytes


def test_a_packed_large_array_goes_to_a_temporary_file_that_is_removed(
    server, tmp_path, monkeypatch
):
    monkeypatch.setattr(npz, "MAP_FROM", 2**20)
    monkeypatch.setattr(npz, "READ_AHEAD", 2**16)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    images = np.zeros((200, 200, 200, 3), np.uint8)
    images[7] = pixels(7, 200, 200, 3)
    np.savez_compressed(tmp_path / "packed.npz", images=images, labels=np.arange(200) % 2)
    source = open_source("npz", path=server.upload(tmp_path / "packed.npz", "packed"))
    entry = source.entries()[7]
    found: list[np.ndarray] = []
    peak = peak_bytes(lambda: found.append(source.decode(entry)))
    assert np.array_equal(found[0], images[7])
    assert peak < 8 * 2**20 < images.nbytes
    assert not list((tmp_path / "temporary").iterdir())

    npz._read_images.cache_clear()
    free = type("Usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: free)
    line = refusal_of(source.decode, entry)
    assert "unpacks to 0.0 GiB, 0.0 are free in" in line
    assert "set TMPDIR" in line


def calls_of(monkeypatch, owner, name: str, argument: int) -> list:
    """One argument of every call of a function from now on."""
    seen: list = []
    function = getattr(owner, name)

    def noted(*arguments):
        seen.append(arguments[argument])
        return function(*arguments)

    monkeypatch.setattr(owner, name, noted)
    return seen


def test_an_index_skips_members_and_a_member_is_one_range(server, monkeypatch):
    large = {f"{n}.JPEG": bytes([n]) * 6_000_000 for n in range(4)}
    uri = server.put("index/val.tar", tar_of(large | {"last.JPEG": png(9)}))
    place = RemotePath.parse(uri)
    version = place.stat_object().version
    asked = calls_of(monkeypatch, RemotePath, "read_range", argument=2)  # lengths
    found: list = []
    assert peak_bytes(lambda: found.extend(archives.members(place, version))) < 3 * places.WINDOW
    assert sum(asked) <= 6 * places.WINDOW  # of 24 MB
    asked.clear()
    content = archives.read_member(place.parent, found[-1].locator(place.name), version)
    assert (content, asked) == (png(9), [len(png(9))])


def test_row_groups_are_read_once_and_kept_up_to_a_limit(server, tmp_path, monkeypatch):
    path, _ = write_parquet(tmp_path / "raw")
    source = open_source("parquet", path=server.upload(path, "groups"))
    groups = calls_of(monkeypatch, parquet, "_group", argument=2)
    train = [entry for entry in source.entries() if entry.split_hint == "train"]
    mixed = [train[n] for n in np.random.default_rng(0).permutation(len(train))]
    (plan,) = plan_shards({"train": mixed}, shard_size=100)
    job = open_job(source, mixed, folder=tmp_path, fitting=Fitting(8, "pad"), on_error="fail")
    monkeypatch.setattr(parquet, "_groups", Kept(1))  # holds one group
    groups.clear()
    write_shard(job, plan)
    assert sorted(groups) == [0, 1, 2, 3, 4]  # however the items are mixed


def test_what_is_kept_stays_below_the_limit():
    kept = Kept(10)
    for size in (6, 4, 5, 50, 3, 7):
        assert kept.get(size, size, lambda: "new") == "new"
        assert kept.num_bytes <= max(10, size)
    assert kept.get(7, 7, lambda: "again") == "new"


# -- identity


def test_the_stamp_is_that_of_the_listing(server, tmp_path):
    path, _ = write_folder(tmp_path / "raw")
    first = source_stamp("folder", server.upload(path, "stamps/a"))
    assert first == source_stamp("folder", server.upload(path, "stamps/b") + "/")  # a copy
    server.put("stamps/b/cat/0.png", png(77))
    assert first != source_stamp("folder", f"s3://{BUCKET}/stamps/b")
    alone = server.put("stamps/one.npz", b"content")
    before = source_stamp("npz", alone)
    server.put("stamps/one.npz", b"tnetnoc")
    assert before != source_stamp("npz", alone)


# -- refusals


def test_each_refusal_is_one_line_with_key_uri_and_remedy(server, tmp_path, monkeypatch):
    def line(path: str, source: str = "folder") -> str:
        text = refusal_of(open_source, source, path=path)
        assert text == refusal_of(source_stamp, source, path)
        return text

    lost = f"s3://{BUCKET}/nothing/here"
    assert (
        line(lost)
        == f"data.path: {lost} holds no objects; correct the URI or upload the files there"
    )
    assert line("s3://no-such-bucket/x") == (
        "data.path: s3://no-such-bucket/x does not exist: create the bucket, or correct its name"
    )
    monkeypatch.setattr(object_stores, "FIRST", object_stores.QUICK)
    monkeypatch.setattr(places, "FIRST", object_stores.QUICK)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert line(lost) == f"data.path: {lost} refuses connections; check AWS_ENDPOINT_URL"
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "has no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in line(lost)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert "names no account; set AZURE_STORAGE_ACCOUNT_NAME" in line("az://container/x")


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("s3:/bucket/x", "has too few slashes; write s3://bucket/prefix"),
        ("s3://", "names no bucket"),
        ("s3://bucket//x", "has an empty part"),
        ("s3://bucket/../x", "has an empty part"),
        ("ftp://host/x", "has a scheme that cannot be read; choose s3://, gs://, az:// or a path"),
    ],
)
def test_a_uri_of_wrong_form_is_refused_without_asking_anyone(path, remedy):
    line = refusal_of(open_source, "folder", path=path)
    assert line.startswith(f"data.path: {path} ")
    assert remedy in line


def test_a_hub_cache_is_a_folder():
    assert "needs a folder of the machines" in refusal_of(open_source, "hf:x", path="s3://b/x")


def test_cut_archives_and_changed_objects_are_refused(server, tmp_path):
    whole = tar_of(val_images())
    member = 512 + (len(png(101)) + 511) // 512 * 512
    for name, size in (
        ("middle", member + 700),
        ("boundary", member),
        ("no end", len(whole) - 10240),
    ):
        place = RemotePath.parse(server.put(f"cut/{name}.tar", whole[:size]))
        line = refusal_of(archives.members, place, place.stat_object().version)
        assert line.startswith(f"data.path: {place} is not a whole tar archive")
        assert line.endswith("copy it again")
    path, _ = write_npz(tmp_path / "raw")
    uri = server.put("cut/set.npz", path.read_bytes()[:-200])
    assert "is not a readable .npz" in refusal_of(open_source, "npz", path=uri)
    uri = server.put("cut/train.parquet", b"PAR1 and little else")
    assert "is not a readable Parquet file" in refusal_of(open_source, "parquet", path=uri)

    uri = server.put("changed/val.tar", whole)
    place = RemotePath.parse(uri)
    version = place.stat_object().version
    first = archives.members(place, version)[0].locator(place.name)
    server.put("changed/val.tar", tar_of(val_images() | {"more.JPEG": png(1)}))
    line = refusal_of(archives.read_member, place.parent, first, version)
    assert line == f"data.path: {uri} changed while it was read; start again"


def test_a_cut_local_archive_is_refused_too(tmp_path):
    root, options = write_archives(tmp_path / "raw")
    archive = root / "ILSVRC2012_img_train.tar"
    archive.write_bytes(archive.read_bytes()[:20_000])
    with pytest.raises(CasemateError, match="is not a whole tar archive"):
        open_source("imagenet", path=str(root), options=below(str(root), options))


def test_a_damaged_image_is_skipped_and_a_lost_one_is_not(server):
    for name in ("a", "b"):
        server.put(f"lost/{name}/1.png", png(1))
        server.put(f"lost/{name}/2.png", b"no image")
    source = open_source("folder", path=f"s3://{BUCKET}/lost")
    good, bad = source.entries()[:2]
    assert "set data.on_error=skip" in refusal_of(source.decode, bad)
    server.store().delete("lost/a/1.png")
    assert refusal_of(source.decode, good).endswith("/lost/a/1.png holds no objects; " + UPLOAD)
