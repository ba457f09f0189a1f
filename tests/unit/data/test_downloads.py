"""Downloads from a real server: stand-ins in the published layouts, torchvision's own functions."""

import gzip
import hashlib
import inspect
import io
import pickle
import shutil
import struct
import tarfile
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

from components.core.errors import CasemateError
from components.data import downloads
from components.data.downloads import DOWNLOADS, Archive, download
from components.data.sources import open_source
from components.data.sources.registry import find_source
from tests.e2e.cli import call
from tests.refusals import refusal_of

RNG = np.random.default_rng(0)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def tar_of(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def picture() -> bytes:
    out = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (9, 8, 3), dtype=np.uint8)).save(out, "JPEG")
    return out.getvalue()


def cifar(served: Path, table, *, label_key: str, classes: int) -> dict:
    """The archive, and the attributes of torchvision's class that describe it."""
    files = {}
    for name, _ in table.train_list + table.test_list:
        data = RNG.integers(0, 256, (4, 3072), dtype=np.uint8)
        files[name] = pickle.dumps({"data": data, label_key: [0, 1, 2, 3]}, protocol=2)
    meta = table.meta["filename"]
    files[meta] = pickle.dumps({table.meta["key"]: [f"c{i}" for i in range(classes)]}, protocol=2)
    path = tar_of(
        served / table.filename, {f"{table.base_folder}/{n}": c for n, c in files.items()}
    )
    sums = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    return {
        "tgz_md5": md5(path),
        "train_list": [[name, sums[name]] for name, _ in table.train_list],
        "test_list": [[name, sums[name]] for name, _ in table.test_list],
        "meta": table.meta | {"md5": sums[meta]},
    }


def idx(served: Path) -> list[tuple[str, str]]:
    """Four files; returns torchvision's list of names and checksums."""
    found = []
    for name, _ in datasets.MNIST.resources:
        shape = (3, 28, 28) if "images" in name else (3,)
        header = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
        values = RNG.integers(0, 10, shape, dtype=np.uint8).tobytes()
        (served / name).write_bytes(gzip.compress(header + values))
        found.append((name, md5(served / name)))
    return found


def flowers(served: Path) -> dict[str, tuple[str, str]]:
    names = {key: name for key, (name, _) in datasets.Flowers102._file_dict.items()}
    tar_of(served / names["image"], {f"jpg/image_{i:05d}.jpg": picture() for i in range(1, 5)})
    savemat(served / names["label"], {"labels": np.array([[1, 2, 102, 5]])})
    ids = {"trnid": np.array([[1]]), "valid": np.array([[2]]), "tstid": np.array([[3, 4]])}
    savemat(served / names["setid"], ids)
    return {key: (name, md5(served / name)) for key, name in names.items()}


def caltech(served: Path) -> str:
    folders = ["BACKGROUND_Google", *(f"class_{i:03d}" for i in range(101))]
    image = picture()
    names = [f"{folder}/image_{i:04d}.jpg" for folder in folders for i in range(1, 32)]
    inner = tar_of(
        served / "inner.tar.gz", {f"101_ObjectCategories/{name}": image for name in names}
    )
    with zipfile.ZipFile(served / "caltech-101.zip", "w") as archive:
        archive.write(inner, "caltech-101/101_ObjectCategories.tar.gz")
        archive.writestr("caltech-101/Annotations.tar", b"not needed")
        archive.writestr("__MACOSX/caltech-101/._101_ObjectCategories.tar.gz", b"not an archive")
    return md5(served / "caltech-101.zip")


def imagenette(served: Path) -> str:
    wnids = datasets.Imagenette._WNID_TO_CLASS
    places = [f"imagenette2/{split}/{wnid}" for split in ("train", "val") for wnid in wnids]
    files = {f"{place}/{place[-9:]}_1.JPEG": picture() for place in places}
    return md5(tar_of(served / "imagenette2.tgz", files))


class Counting(SimpleHTTPRequestHandler):
    """Keeps the paths that were asked for."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path.removeprefix("/"))
        super().do_GET()

    def log_message(self, *words) -> None:
        pass


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A server of stand-ins of all datasets, and torchvision's tables that name it."""
    served = tmp_path_factory.mktemp("served")
    tables = [
        (datasets.CIFAR10, cifar(served, datasets.CIFAR10, label_key="labels", classes=10)),
        (datasets.CIFAR100, cifar(served, datasets.CIFAR100, label_key="fine_labels", classes=100)),
        (datasets.MNIST, {"resources": idx(served)}),
        (datasets.Flowers102, {"_file_dict": flowers(served)}),
    ]
    sums = {"caltech": caltech(served), "imagenette": imagenette(served)}
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Counting, directory=str(served)))
    server.asked = []
    at = f"http://127.0.0.1:{server.server_port}/"
    for table, values in tables[:2]:
        values["url"] = at + table.filename
    tables[2][1]["mirrors"] = [f"{at}nowhere/", at]
    tables[3][1]["_download_url_prefix"] = at
    full = {"full": (f"{at}imagenette2.tgz", sums["imagenette"])}
    tables.append((datasets.Imagenette, {"_ARCHIVES": full}))
    tables.append((downloads, {"CALTECH": Archive((f"{at}caltech-101.zip",), sums["caltech"])}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, served, tables
    server.shutdown()
    server.server_close()


@pytest.fixture
def server(published, monkeypatch):
    found, served, tables = published
    for table, values in tables:
        for name, value in values.items():
            monkeypatch.setattr(table, name, value)
    found.asked.clear()
    found.served = served
    return found


def get(name: str, root: Path):
    return download(name, root, report=lambda line: None)


COUNTS = {
    "cifar10": {"train": 20, "test": 4},
    "cifar100": {"train": 4, "test": 4},
    "mnist": {"train": 3, "test": 3},
    "flowers102": {"train": 1, "val": 1, "test": 2},
    "caltech101": {"train": 102 * 30, "test": 102},
    "imagenette": {"train": 10, "test": 10},
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_download_is_what_the_source_of_its_name_reads(server, tmp_path, name):
    root = tmp_path / "new" / name
    told = call("data", "get", name, "--to", root)
    assert told.code == 0, told.err
    counts = ", ".join(f"{split} {count:,}" for split, count in COUNTS[name].items())
    assert f"{sum(COUNTS[name].values()):,} items ({counts})" in told.out
    assert f"data:\n  source: {name}\n  path: {root}\n" in told.out
    source = open_source(name, path=str(root))
    for entry in source.entries()[:3]:
        assert source.decode(entry).dtype == np.uint8
    left = {path.name for path in root.iterdir()}
    assert left == {DOWNLOADS[name].folder, f"{name}.download.json"}  # no archive, nothing hidden
    before = list(server.asked)
    again = call("data", "get", name, "--to", root, "--json")
    assert again.json["was_there"] is True
    assert again.json["splits"] == COUNTS[name]
    assert server.asked == before  # nothing is downloaded again


def test_several_datasets_share_a_folder(server, tmp_path):
    for name in ("cifar10", "mnist"):
        get(name, tmp_path)
    for name in ("cifar10", "mnist"):
        assert open_source(name, path=str(tmp_path)).entries()
        assert get(name, tmp_path).was_there


@pytest.mark.parametrize("change", [lambda p: p.write_bytes(b"x"), lambda p: p.unlink()])
def test_a_damaged_copy_is_named_and_not_replaced(server, tmp_path, change):
    made = get("mnist", tmp_path)
    victim = made.folder / "raw" / "t10k-images-idx3-ubyte"
    change(victim)
    server.asked.clear()
    told = call("data", "get", "mnist", "--to", tmp_path)
    assert told.code == 2
    assert str(victim) in told.err
    assert f"remove {made.folder}" in told.err
    assert server.asked == []
    shutil.rmtree(made.folder)  # what the line says
    assert not get("mnist", tmp_path).was_there


def test_a_changed_byte_of_equal_length_is_found(server, tmp_path):
    made = get("imagenette", tmp_path)
    victim = sorted(made.folder.rglob("*.JPEG"))[4]
    content = bytearray(victim.read_bytes())
    content[-9] ^= 1
    victim.write_bytes(content)
    assert victim.name in refusal_of(get, "imagenette", tmp_path)


def test_torchvisions_own_copy_is_taken_over(server, tmp_path):
    datasets.CIFAR10(tmp_path, download=True)
    server.asked.clear()
    assert get("cifar10", tmp_path).was_there
    assert server.asked == []
    (tmp_path / "cifar10.download.json").unlink()
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(b"")
    assert "data_batch_3 does not have the published" in refusal_of(get, "cifar10", tmp_path)


def test_a_folder_without_checksums_is_not_called_whole(server, tmp_path):
    (tmp_path / "caltech101").mkdir()
    assert "nothing tells whether it is whole" in refusal_of(get, "caltech101", tmp_path)


def test_a_wrong_checksum_publishes_nothing(server, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", "0" * 32)
    told = call("data", "get", "cifar10", "--to", tmp_path / "new")
    assert told.code == 2
    size = (server.served / "cifar-10-python.tar.gz").stat().st_size
    assert f"gave {size:,} bytes with md5 " in told.err
    assert told.err.strip().splitlines()[-1].startswith("casemate: ")
    assert not (tmp_path / "new").exists()


def test_verified_archives_are_kept_for_the_next_call(server, tmp_path):
    missing = server.served / "train-labels-idx1-ubyte.gz"
    aside = missing.rename(missing.with_suffix(".aside"))
    try:
        assert "answers 404" in refusal_of(get, "mnist", tmp_path)
    finally:
        aside.rename(missing)
    assert [path.name for path in tmp_path.iterdir()] == [".mnist.download"]
    server.asked.clear()
    get("mnist", tmp_path)
    assert "train-images-idx3-ubyte.gz" not in server.asked
    assert "train-labels-idx1-ubyte.gz" in server.asked
    assert {path.name for path in tmp_path.iterdir()} == {"MNIST", "mnist.download.json"}


@pytest.mark.parametrize(
    "at", ["components.data.downloads._extract", "torchvision.datasets.utils._urlretrieve"]
)
def test_an_interrupted_call_publishes_nothing(server, tmp_path, at):
    def stop(*arguments):
        if "_urlretrieve" in at:
            Path(arguments[1]).write_bytes(b"half")
        raise KeyboardInterrupt

    with mock.patch(at, side_effect=stop), pytest.raises(KeyboardInterrupt):
        get("cifar10", tmp_path / "new")
    assert not list((tmp_path).rglob("cifar-10-batches-py"))
    assert not [p for p in tmp_path.rglob("*.gz") if p.read_bytes() == b"half"]
    assert not get("cifar10", tmp_path / "new").was_there


def test_a_lost_server_is_one_line(server, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    told = call("data", "get", "cifar10", "--to", tmp_path / "new")
    assert told.code == 2
    assert "127.0.0.1:9" in told.err
    assert "cannot be reached" in told.err
    assert not (tmp_path / "new").exists()


def test_too_little_room_is_told_before_anything_is_asked(server, tmp_path):
    usage = shutil.disk_usage(tmp_path)._replace(free=10 * 2**20)
    with mock.patch("shutil.disk_usage", return_value=usage):
        told = call("data", "get", "imagenette", "--to", tmp_path / "new")
    assert told.code == 2
    assert "has 10 MB free, and imagenette needs about 3,200 MB" in told.err
    assert server.asked == []
    assert not (tmp_path / "new").exists()


def test_a_disk_that_fills_up_is_one_line(server, tmp_path):
    full = OSError(28, "No space left on device")
    with mock.patch("torchvision.datasets.utils._urlretrieve", side_effect=full):
        assert "has no room left" in refusal_of(get, "cifar10", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_two_calls_do_not_fill_one_folder(server, tmp_path):
    def inside(packed, archives, folder):
        assert "another process" in refusal_of(get, "cifar10", tmp_path)
        raise CasemateError("stop", "", "here")

    plan = downloads.Download("cifar-10-batches-py", 1, DOWNLOADS["cifar10"].archives, inside)
    with mock.patch.dict(DOWNLOADS, cifar10=plan), pytest.raises(CasemateError, match="stop"):
        get("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("to", "said"), [("s3://bucket/data", "is a URI"), ("{file}", "fails"), ("{file}/x", "fails")]
)
def test_places_that_cannot_hold_data(server, tmp_path, to, said):
    (tmp_path / "file").touch()
    assert said in refusal_of(get, "cifar10", to.format(file=tmp_path / "file"))


def test_every_download_has_a_source_and_a_published_checksum():
    for name, wanted in DOWNLOADS.items():
        assert find_source(name).num_classes
        for archive in wanted.archives():
            assert all(url.startswith("http") for url in archive.urls)
            assert len(archive.md5) == 32
    text = inspect.getsource(datasets.Caltech101)
    assert downloads.CALTECH.urls[0] in text
    assert downloads.CALTECH.md5 in text
