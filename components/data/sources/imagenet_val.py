"""Classes of the 50,000 ImageNet validation images in a flat folder."""

import re

from components.core.errors import CasemateError, at_key
from components.data.places import Place
from components.data.sources.names import imagenet_synsets

_KEY = "data.options.val_map"
_HEADER = "ImageId,PredictionString"  # first line of the table that Kaggle ships
_LINE = re.compile(r"(ILSVRC2012_val_\d{8})(?:\.JPEG)?[\s,]+(n\d{8})\b")
_WNID = re.compile(r"n\d{8}")


def read_val_map(path: Place, *, synset_order: Place | None) -> dict[str, str]:
    """File name -> wnid.

    Lines `ILSVRC2012_val_00000001.JPEG n01751748` (a comma, a missing suffix and boxes after the
    wnid are accepted), or the devkit's ground truth: a class number per line, image after image.
    """
    lines = _read_lines(path, key=_KEY)
    if all(line.isdigit() for line in lines):
        return _from_numbers(path, lines, synset_order)
    if synset_order is not None:
        remedy = "would be ignored: the map names classes by wnid; remove it"
        raise CasemateError("data.options.synset_order", synset_order, remedy)
    if lines[0] == _HEADER:
        lines = lines[1:]
    known = set(imagenet_synsets())
    wnid_of: dict[str, str] = {}
    for line in lines:
        match = _LINE.match(line)
        if match is None or match[2] not in known:
            remedy = f"has a line that is not `<image> <wnid of ImageNet>`: {line[:60]}"
            raise CasemateError(_KEY, path, remedy)
        name = f"{match[1]}.JPEG"
        if wnid_of.setdefault(name, match[2]) != match[2]:
            raise CasemateError(_KEY, path, f"gives two classes to {name}")
    return wnid_of


def _from_numbers(path: Place, lines: list[str], synset_order: Place | None) -> dict[str, str]:
    if synset_order is None:
        remedy = (
            f"must be set: {path.name} holds the devkit's class numbers, whose order is not "
            "alphabetic; name the devkit's meta.mat or a list of wnids in its order"
        )
        raise CasemateError("data.options.synset_order", None, remedy)
    order = _read_order(synset_order)
    wnid_of: dict[str, str] = {}
    for index, line in enumerate(lines, start=1):
        if not 1 <= int(line) <= len(order):
            raise CasemateError(_KEY, path, f"has class {line} at line {index}; allowed: 1 to 1000")
        wnid_of[f"ILSVRC2012_val_{index:08d}.JPEG"] = order[int(line) - 1]
    return wnid_of


def _read_order(path: Place) -> list[str]:
    """The 1000 wnids by the devkit's numbers, from meta.mat or from a text with one per line."""
    key = "data.options.synset_order"
    order = _from_meta(path) if path.suffix == ".mat" else _from_text(path)
    if sorted(order) != list(imagenet_synsets()):
        raise CasemateError(key, path, "does not name each of the 1000 classes of ImageNet once")
    if order == sorted(order):
        remedy = "is sorted, but the devkit's numbers are not; name the devkit's meta.mat"
        raise CasemateError(key, path, remedy)
    return order


def _from_text(path: Place) -> list[str]:
    found = [_WNID.search(line) for line in _read_lines(path, key="data.options.synset_order")]
    return [match[0] for match in found if match]


def _from_meta(path: Place) -> list[str]:
    from scipy.io import loadmat

    try:
        with at_key("data.options.synset_order"), path.open("rb") as file:
            rows = loadmat(file, squeeze_me=True)["synsets"]
        leaves = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in rows}
    except CasemateError:
        raise
    except Exception as error:  # a damaged .mat fails in many ways
        remedy = f"is not the meta.mat of the ILSVRC-2012 devkit ({error})"
        raise CasemateError("data.options.synset_order", path, remedy) from error
    return [leaves[number] for number in sorted(leaves) if number <= 1000]  # above: inner nodes


def _read_lines(path: Place, *, key: str) -> list[str]:
    try:
        with at_key(key):
            text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CasemateError(key, path, f"is not a readable text ({error})") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise CasemateError(key, path, "is empty")
    return lines
