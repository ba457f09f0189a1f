"""Which source reads a folder or file: seen from names and headers, before anything is listed."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from components.core.documents import parse_json
from components.core.errors import CasemateError
from components.data.places import Place, missing, place_of
from components.data.sources.files import looks_like_image, no_images, sub_folders
from components.data.sources.folder import wrapped, wrapped_words
from components.data.sources.names import CORRUPTIONS
from components.data.sources.registry import all_sources
from components.data.sources.splitting import usual_split

if TYPE_CHECKING:
    import pyarrow as pa

DATASET = "dataset.json"  # of a prepared dataset
PARQUET = ".parquet"
LABELS = ("label", "labels", "fine_label", "target", "class", "y")  # columns, the usual one first
WNID = re.compile(r"n\d{8}")
NUM_IMAGENET = 1000
FIRST_FASHION = (9, 2, 1, 1, 6, 1, 4, 6, 5, 7)  # labels of the first test images


@dataclass(frozen=True, slots=True)
class Recognised:
    """A source with the path and options that read the images, and why it was chosen."""

    source: str
    path: str | None
    options: dict[str, Any] = field(default_factory=dict)
    because: str = ""
    notices: tuple[str, ...] = ()


def recognise(data: str) -> Recognised:
    """The source of a folder, a file, a URI, or of a name that needs no files.

    An error of one line if no source reads it.
    """
    place = place_of(data)
    if not place.exists():
        embedded = {info.name: info for info in all_sources() if info.path == "none"}
        if data in embedded:
            return Recognised(data, None, because=embedded[data].title)
        if data in (info.name for info in all_sources()):
            remedy = "is a source that reads files; name their folder instead"
            raise CasemateError("--data", data, remedy)
        raise missing(place)
    if place.is_file():
        return _of_file(place)
    found = next((found for look in FOLDERS if (found := look(place))), None)
    return found or _class_folders(place)


def _of_file(place: Place) -> Recognised:
    if place.suffix == ".npz":
        return Recognised("npz", str(place), because="one .npz file")
    if place.suffix == PARQUET:
        return Recognised("parquet", str(place), _columns(place), because="one Parquet file")
    remedy = "is neither an .npz nor a Parquet file; other sources read folders"
    raise CasemateError("--data", place, remedy)


def _prepared(root: Place) -> Recognised | None:
    """A prepared dataset is read as the Parquet files that it consists of."""
    if not (root / DATASET).is_file():
        return None
    try:
        document = parse_json((root / DATASET).read_bytes())
        classes = [str(name) for name in document["classes"]]
        filled = {name for name, part in document["splits"].items() if part["num_items"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = f"is not the description of a prepared dataset ({error})"
        raise CasemateError("--data", root / DATASET, remedy) from error
    splits = {name: name for name in ("train", "val", "test") if name in filled}
    left_out = sorted(filled - set(splits))
    notices = [f"the split {name} of the prepared dataset is not used" for name in left_out]
    options = {"classes": classes, "splits": splits}
    because = "a prepared dataset; its shards are Parquet files"
    return Recognised("parquet", str(root), options, because, tuple(notices))


def _cifar(root: Place) -> Recognised | None:
    for name, folder, meta in (
        ("cifar10", "cifar-10-batches-py", "batches.meta"),
        ("cifar100", "cifar-100-python", "meta"),
    ):
        if (root / folder / meta).is_file():
            return Recognised(name, str(root), because=f"it holds {folder}")
        if (root / meta).is_file():
            return Recognised(name, str(root), because=f"it is {folder}")
    return None


def _idx(root: Place) -> Recognised | None:
    """MNIST or Fashion-MNIST: by torchvision's folder, else by the first labels."""
    for name, folder in (("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")):
        if (root / folder / "raw").is_dir():
            return Recognised(name, str(root), because=f"it holds {folder}/raw")
    files = [path.name for path in root.iterdir() if path.is_file()]
    if not any(name.startswith("train-images") and "idx3" in name for name in files):
        return None
    from components.data.sources.idx import open_fashion_mnist

    entries = open_fashion_mnist(root).entries()
    first = tuple(entry.label for entry in entries if entry.split_hint == "test")[:10]
    name = "fashion_mnist" if first == FIRST_FASHION else "mnist"
    return Recognised(name, str(root), because="it holds IDX files; the labels tell which")


def _corrupted_cifar(root: Place) -> Recognised | None:
    labels = root / "labels.npy"
    if not (labels.is_file() and any((root / f"{name}.npy").is_file() for name in CORRUPTIONS)):
        return None
    import numpy as np

    try:
        with labels.open("rb") as file:
            most = int(np.load(file, allow_pickle=False).max())
    except (OSError, ValueError, EOFError) as error:
        raise CasemateError("--data", labels, f"is not a readable array ({error})") from error
    present = [name for name in CORRUPTIONS if (root / f"{name}.npy").is_file()]
    options = {"corruption": present, "severity": "all"}
    name = "cifar10_c" if most < 10 else "cifar100_c"
    return Recognised(name, str(root), options, "it holds labels.npy and arrays of corruptions")


def _published_trees(root: Place) -> Recognised | None:
    """Caltech-101, Flowers-102 and a whole ImageNet, as their archives unpack."""
    if (root / "101_ObjectCategories").is_dir():
        return Recognised("caltech101", str(root), because="it holds 101_ObjectCategories")
    if (root / "imagelabels.mat").is_file() and (root / "setid.mat").is_file():
        because = "it holds imagelabels.mat and setid.mat"
        return Recognised("flowers102", str(root), because=because)
    train = root / "train"
    if train.is_dir() and (root / "val").is_dir():
        wnids = [name for name in sub_folders(train) if WNID.fullmatch(name)]
        if len(wnids) == NUM_IMAGENET:
            because = f"train holds the {NUM_IMAGENET} class folders of ILSVRC-2012"
            return Recognised("imagenet", str(root), because=because)
    return None


def _parquet(root: Place) -> Recognised | None:
    """Parquet files in the folder or one level below: deeper ones may be anything."""
    folders = [root, *(root / name for name in sub_folders(root))]
    files = [path for folder in folders for path in folder.iterdir() if path.suffix == PARQUET]
    if not files:
        return None
    columns = _columns(min(files, key=str))
    return Recognised("parquet", str(root), columns, because="it holds Parquet files")


def _columns(path: Place) -> dict[str, str]:
    """Options that name the columns of images and labels, where they have unusual names."""
    import pyarrow as pa

    from components.data.sources.parquet import schema_of

    fields = {field.name: field.type for field in schema_of(path)}
    images = [name for name, kind in fields.items() if _holds_images(kind)]
    labels = [n for n, k in fields.items() if pa.types.is_integer(k) or pa.types.is_string(k)]
    found = {}
    if "image" not in fields and len(images) == 1:
        found["image_column"] = images[0]
    usual = [name for name in LABELS if name in labels] or labels
    if "label" not in fields and usual and (len(usual) == 1 or usual[0] in LABELS):
        found["label_column"] = usual[0]
    return found


def _holds_images(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return bool(kind.get_field_index("bytes") >= 0)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _npz(root: Place) -> Recognised | None:
    files: list[Place] = [path for path in root.iterdir() if path.suffix == ".npz"]
    if not files:
        return None
    if len(files) > 1:
        names = ", ".join(sorted(path.name for path in files)[:5])
        remedy = f"holds {len(files)} .npz files ({names}); name one of them"
        raise CasemateError("--data", root, remedy)
    return Recognised("npz", str(files[0]), because="its one .npz file")


FOLDERS: tuple[Callable[[Place], Recognised | None], ...] = (
    *(_prepared, _cifar, _idx, _corrupted_cifar, _published_trees, _parquet, _npz),
)


def _class_folders(root: Place) -> Recognised:
    """Image files in one folder per class, perhaps below folders of splits."""
    folders = sub_folders(root)
    flat = [path.name for path in root.iterdir() if looks_like_image(path.name)]
    if not folders:
        if not flat:
            raise no_images(root)
        remedy = f"holds {len(flat)} images and no class folders; move each image to its class"
        raise CasemateError("--data", root, remedy)
    if inner := wrapped(root):
        raise CasemateError("--data", root, wrapped_words(inner))
    notices = [f"{len(flat)} images beside the folders belong to no class: left out"] * bool(flat)
    splits = [name for name in folders if usual_split(name) and not _has_images(root / name)]
    if not splits:
        because = "one folder of images per class"
        return Recognised("folder", str(root), {}, because, tuple(notices))
    because = f"class folders below {', '.join(splits)}"
    others = [name for name in folders if name not in splits]
    chosen = {usual_split(name): name for name in splits}
    if not others or len(chosen) < len(splits):
        return Recognised("folder", str(root), {}, because, tuple(notices))
    notices += [f"the folder {name} is not a split: left out" for name in others]
    return Recognised("folder", str(root), {"splits": chosen}, because, tuple(notices))


def _has_images(folder: Place) -> bool:
    return any(looks_like_image(path.name) for path in folder.iterdir())
