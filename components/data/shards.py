"""Writing the prepared format: Parquet shards whose bytes depend only on their plan.

Free of torch, so that workers start quickly. Shards are written atomically (write, sync, rename),
then their records; a restart keeps every shard whose record and checksum match.
"""

import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from components.core.digests import canonical_json, digest_bytes, digest_file, digest_json
from components.core.errors import CasemateError
from components.core.files import write_atomic, write_text
from components.data.encodings import PNG, Encoding
from components.data.fitting import Fitting
from components.data.sources.base import Entry, Pixels, Source, UndecodableItemError, encoded

FORMAT = "casemate-dataset/1"
SHARD_SCHEMA = pa.schema(
    [
        ("item_id", pa.string()),
        ("image", pa.binary()),  # as the `Encoding` of the split says, 8 bits per channel
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("label", pa.int32()),
    ]
)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file and its entries, in order."""

    file: str
    split: str
    entries: tuple[Entry, ...]

    def to_json(self) -> str:
        fields = [[e.item_id, e.label, e.split_hint, e.locator, e.version] for e in self.entries]
        return canonical_json({"file": self.file, "split": self.split, "entries": fields})

    def packed(self) -> bytes:
        """Compressed for sending to a worker: similar names, so that a million entries fit."""
        return zlib.compress(self.to_json().encode())

    @staticmethod
    def unpacked(content: bytes) -> "ShardPlan":
        plan = json.loads(zlib.decompress(content))
        entries = tuple(Entry(*fields) for fields in plan["entries"])
        return ShardPlan(plan["file"], plan["split"], entries)


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """Content of a finished shard: enough to describe the dataset without opening the shard."""

    file: str
    split: str
    sha256: str
    item_digests: list[str]
    labels: list[int]  # the distinct ones
    skipped: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ShardJob:
    """Input shared by all shards of one source and size; sent to the workers once."""

    folder: Path
    source: Source
    fitting: Fitting
    on_error: str
    shape: tuple[int, ...]  # (H, W, C) of every item
    reference_id: str  # the item that defines the shape
    encoding: Encoding = PNG

    def plan_key(self, plan: ShardPlan) -> str:
        """Digest of a shard's expected content: records of other plans are not reused."""
        parts = [FORMAT, plan.to_json(), asdict(self.fitting), self.on_error, list(self.shape)]
        return digest_json(parts if self.encoding == PNG else [*parts, self.encoding.to_dict()])


def plan_shards(splits: Mapping[str, Sequence[Entry]], *, shard_size: int) -> list[ShardPlan]:
    """Consecutive runs of `shard_size` entries; the last one of a split may be shorter."""
    if shard_size < 1:
        raise CasemateError("data.shard_size", shard_size, "must be at least 1")
    return [
        ShardPlan(
            f"{split}-{number:05d}.parquet", split, tuple(entries[start : start + shard_size])
        )
        for split, entries in splits.items()
        for number, start in enumerate(range(0, len(entries), shard_size))
    ]


def open_job(
    source: Source,
    entries: Iterable[Entry],
    *,
    folder: Path,
    fitting: Fitting,
    on_error: str,
) -> ShardJob:
    """The job whose shape is that of the first entry that can be decoded."""
    if on_error not in ("fail", "skip"):
        raise CasemateError("data.on_error", on_error, "is unknown; choose fail or skip")
    for entry in entries:
        try:
            pixels = fitting.apply(source.decode(entry), item_id=entry.item_id)
        except UndecodableItemError:
            if on_error == "fail":
                raise
            continue  # counted and reported by the shard of this entry
        return ShardJob(folder, source, fitting, on_error, pixels.shape, entry.item_id)
    raise CasemateError("data.source", "no item", "could be decoded; see data.path")


def write_shard(job: ShardJob, plan: ShardPlan) -> ShardRecord:
    """Decode, fit, encode and write the entries of one plan, unless already done."""
    done = finished_record(job, plan)
    if done is not None:
        return done
    items = _items(job, plan)
    rows = [row for row, _ in items if isinstance(row, dict)]
    digests = [digest for row, digest in items if isinstance(row, dict)]
    skipped = [
        {"item_id": entry.item_id, "split": plan.split, "reason": row}
        for entry, (row, _) in zip(plan.entries, items, strict=True)
        if isinstance(row, str)
    ]
    content = _parquet_bytes(rows, job.encoding)
    write_atomic(job.folder / plan.file, content)
    labels = sorted({int(row["label"]) for row in rows})
    sha256 = hashlib.sha256(content).hexdigest()
    record = ShardRecord(plan.file, plan.split, sha256, digests, labels, skipped)
    proof = {"plan": job.plan_key(plan), "record": asdict(record)}
    write_text(record_path(job.folder, plan.file), canonical_json(proof))
    return record


def _items(job: ShardJob, plan: ShardPlan) -> list[tuple[dict[str, Any] | str, str]]:
    """(row, digest) of every entry, in the order of the plan; for a skipped one (reason, "").

    Entries are read in the order of the source's files: neighbours in a large file are read
    together, however they are shuffled.
    """
    found: dict[int, tuple[dict[str, Any] | str, str]] = {}
    for place in sorted(range(len(plan.entries)), key=lambda i: plan.entries[i].locator):
        entry = plan.entries[place]
        try:
            pixels, original = _fitted(job, entry)
        except UndecodableItemError as error:
            if job.on_error == "fail":
                raise
            found[place] = (str(error), "")
            continue
        content = job.encoding.encode(pixels, original=original)
        digest = item_digest(
            entry.item_id,
            label=entry.label,
            pixels=pixels,
            stored=None if job.encoding.lossless else content,
        )
        found[place] = (_row(entry, content, pixels.shape), digest)
    return [found[place] for place in range(len(plan.entries))]


def finished_record(job: ShardJob, plan: ShardPlan) -> ShardRecord | None:
    """The record of an earlier start if it matches the plan and the shard is undamaged."""
    shard, note = job.folder / plan.file, record_path(job.folder, plan.file)
    if not (shard.is_file() and note.is_file()):
        return None
    try:
        proof = json.loads(note.read_text(encoding="utf-8"))
        if proof["plan"] != job.plan_key(plan):
            return None
        record = ShardRecord(**proof["record"])
    except (ValueError, KeyError, TypeError):  # damaged record: write the shard again
        return None
    return record if digest_file(shard) == record.sha256 else None


def record_path(folder: Path, file: str) -> Path:
    """Path of a shard's record until the dataset is complete."""
    return folder / f"{file}.record.json"


def describe_dataset(
    records: Sequence[ShardRecord],
    *,
    classes: Sequence[str],
    shape: tuple[int, ...],
    split_names: Sequence[str],
    source: Mapping[str, object],
    split_shapes: Mapping[str, tuple[int, ...]] | None = None,
    encodings: Mapping[str, Encoding] | None = None,
) -> str:
    """The text of dataset.json; `shape` is that of model inputs, `split_shapes` has the others.

    `encodings` has those of splits that are not PNG.
    """
    others = {name: e for name, e in (encodings or {}).items() if e != PNG}
    by_split = {name: [r for r in records if r.split == name] for name in split_names}
    height, width, channels = shape
    stored = {name: (split_shapes or {}).get(name, shape) for name in split_names}
    listing = {
        name: {
            "height": stored[name][0],
            "width": stored[name][1],
            **({"encoding": others[name].to_dict()} if name in others else {}),
            "num_items": sum(len(r.item_digests) for r in shards),
            "shards": [
                {"file": r.file, "sha256": r.sha256, "num_items": len(r.item_digests)}
                for r in shards
            ],
        }
        for name, shards in by_split.items()
    }
    items = {name: [d for r in rows for d in r.item_digests] for name, rows in by_split.items()}
    document = {
        "format": FORMAT,
        "classes": list(classes),
        "channels": channels,
        "height": height,
        "width": width,
        "splits": listing,
        "source": dict(source),
        "skipped": [item for record in records for item in record.skipped],
        "digest": dataset_digest(items, classes=classes, encodings=others),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def item_digest(item_id: str, *, label: int, pixels: Pixels, stored: bytes | None = None) -> str:
    """SHA-256 of one item's id, label, shape and pixels: not of its PNG, which depends on zlib.

    `stored` replaces the pixels where the stored bytes define what is read, as with JPEG.
    """
    numbers = np.array([label, *pixels.shape], dtype="<i8").tobytes()
    return digest_bytes(item_id.encode(), numbers, pixels.tobytes() if stored is None else stored)


def dataset_digest(
    items: Mapping[str, Sequence[str]],
    *,
    classes: Sequence[str],
    encodings: Mapping[str, Encoding] | None = None,
) -> str:
    """SHA-256 of classes and of item digests per split in stored order; independent of shards.

    Lossless encodings do not count; of others the decoder does, as pixels depend on it.
    """
    chunks = [FORMAT.encode(), canonical_json(list(classes)).encode()]
    for split in sorted(items):
        chunks += [split.encode(), bytes.fromhex("".join(items[split]))]
    lossy = {name: e.to_dict() for name, e in (encodings or {}).items() if not e.lossless}
    if lossy:
        chunks.append(canonical_json(lossy).encode())
    return digest_bytes(*chunks)


def _fitted(job: ShardJob, entry: Entry) -> tuple[Pixels, bytes | None]:
    """The pixels to store, and the source's encoded image if it has one and may be kept."""
    decoded = job.source.decode(entry)
    pixels = job.fitting.apply(decoded, item_id=entry.item_id)
    if pixels.shape == job.shape:
        lossy = not job.encoding.lossless and np.array_equal(pixels, decoded)
        return pixels, encoded(job.source, entry) if lossy else None
    key = "channels" if pixels.shape[:2] == job.shape[:2] else "image_size"
    sizes = ["x".join(map(str, shape)) for shape in (pixels.shape, job.shape)]
    remedy = f"is {sizes[0]} while {job.reference_id} is {sizes[1]}; set data.{key}"
    raise CasemateError(f"data.{key}", entry.item_id, remedy)


def _row(entry: Entry, content: bytes, shape: tuple[int, ...]) -> dict[str, Any]:
    height, width, _ = shape
    return {
        "item_id": entry.item_id,
        "image": content,
        "height": height,
        "width": width,
        "label": entry.label,
    }


def _parquet_bytes(rows: list[dict[str, Any]], encoding: Encoding) -> bytes:
    buffer = io.BytesIO()
    table = pa.Table.from_pylist(rows, schema=SHARD_SCHEMA)
    compression = "none" if encoding.format == "raw" else "zstd"  # raw: nothing to decode
    pq.write_table(table, buffer, compression=compression)
    return buffer.getvalue()
