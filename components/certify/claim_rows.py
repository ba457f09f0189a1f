"""Columns and types that the rows of all certificates share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from components.certify.vote_rows import ITEM_COLUMNS, ItemVotes

CERTIFICATES_NAME = "certificates.parquet"
CERTIFICATE_NAME = "certificate.json"
ITEM_FIELDS = [
    *ITEM_COLUMNS,
    ("prediction", pa.int32()),
    ("abstain", pa.bool_()),
    ("correct", pa.bool_()),
]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Derived:
    """A certificate before it is written: columns, one row per item, accuracies."""

    schema: pa.Schema
    rows: list[Row]
    summary: dict[str, Any]

    @property
    def table(self) -> pa.Table:
        """The rows as a table in the format of certificates.parquet."""
        columns = [pa.array([row[f.name] for row in self.rows], f.type) for f in self.schema]
        return pa.Table.from_arrays(columns, schema=self.schema)


@dataclass(frozen=True, slots=True)
class StoredClaims:
    """The claims of a stored certificate, and the summary recomputed from its votes."""

    rows: Sequence[Row]
    summary: Mapping[str, Any]
    threat: Mapping[str, Any]


def item_fields(item: ItemVotes, prediction: int) -> Row:
    """The values of ITEM_FIELDS; a negative prediction is an abstention."""
    return {
        "item_id": item.item_id,
        "label": item.label,
        "image_sha256": item.image_sha256,
        "prediction": prediction,
        "abstain": prediction < 0,
        "correct": prediction == item.label,
    }
