"""Plan of the prepare stage: one step, identified by the content of the data files."""

from typing import Any

from components.core.errors import below_key
from components.core.folders import Folder
from components.core.settings import plain
from components.data.settings import DataSettings
from pipelines.stages.registry import DATASET, Planning, Step


def steps(planning: Planning) -> list[Step]:
    """The prepared dataset: the recipe's own, or a finished one instead."""
    prepared = planning.prepared
    data = _dataset_identity(prepared) if prepared else _data_identity(planning.recipe.data)
    return [Step(DATASET, identity={"data": data}, given=prepared)]


def _dataset_identity(prepared: Folder) -> dict[str, object]:
    from components.data.stream import read_document

    return {"digest": read_document(prepared / "dataset.json")["digest"]}


def _data_identity(section: DataSettings) -> dict[str, object]:
    """The data section with the content of its files instead of their paths."""
    values: dict[str, Any] = plain(section)  # shard_size too: it orders streamed training
    for key, part in (("data", values), ("data.synthetic", values["synthetic"])):
        if part:
            with below_key(key, instead_of="data"):
                part |= _content(part["source"], part.pop("path"), part.pop("options"))
    if section.train_format == "jpeg":
        from components.data.encodings import jpeg_decoder

        values["decoder"] = jpeg_decoder()  # it decides on the pixels of training
    return values


def _content(source: str, path: str | None, options: dict[str, object]) -> dict[str, object]:
    """Digest of a source's files, and the options that do not name a file."""
    from components.data.sources.stamp import named_files, source_stamp

    files = named_files(source, options)
    others = {key: value for key, value in options.items() if key not in files}
    return {"content": source_stamp(source, path, options), "options": others}
