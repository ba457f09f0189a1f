"""Independent check of a certificate: recompute every claim from the votes, without the model.

Unreadable files raise; a claim that does not follow from the votes becomes a problem that names
item and column.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.certify.certificate import (
    FORMAT_VERSION,
    CertificateDocument,
    check_claim,
    describe_certificate,
    write_certificate,
)
from components.certify.claim_rows import CERTIFICATE_NAME, CERTIFICATES_NAME, Row, StoredClaims
from components.certify.registry import family_of
from components.certify.vote_rows import VOTES_NAME
from components.certify.votes import read_votes
from components.core.digests import digest_file
from components.core.documents import parse_json
from components.core.errors import CasemateError
from components.core.files import atomic
from components.core.tables import read_table

SPARE_ROWS = 1000  # that are read and named one by one; a longer table is refused


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """How many items were checked, and every claim that does not follow from the votes."""

    num_items: int
    problems: list[str]
    sound: bool = True  # False: the rule only reproduces published tables
    signed_by: str = ""  # id of the key whose signature was asked for and holds

    @property
    def ok(self) -> bool:
        """Whether every claim holds."""
        return not self.problems


def verify(path: Path) -> VerifyReport:
    """Recompute every claim of a certificate; `path` is its folder or either of its two files.

    Equality is exact, down to the last bit of a radius.
    """
    folder = certificate_folder(path)
    document = read_document(folder)
    votes = read_votes(folder / VOTES_NAME)
    stored = read_table(folder / CERTIFICATES_NAME, max_rows=votes.header.num_items + SPARE_ROWS)
    family = family_of(votes.header.kind)
    claim = check_claim(votes.header, document["claim"])
    derived = family.derive(votes, claim)
    table, summary = derived.table, derived.summary
    expected = describe_certificate(
        votes, claim, summary, certificates_sha256=digest_file(folder / CERTIFICATES_NAME)
    )
    problems = list(_compare_values(document, expected.to_dict(), CERTIFICATE_NAME))
    sound = family.is_sound(document["claim"])
    if not stored.schema.equals(table.schema) or any(c.null_count for c in stored.columns):
        problems.append(
            f"{CERTIFICATES_NAME}: has other columns than a certificate, or empty cells"
        )
        return VerifyReport(table.num_rows, problems, sound)
    rows = stored.to_pylist()
    problems += _compare_rows(rows, table.to_pylist())
    problems += family.audit(votes, claim, StoredClaims(rows, summary, document["threat"]))
    return VerifyReport(table.num_rows, problems, sound)


def recertify(path: Path, out: Path, **changes: object) -> CertificateDocument:
    """Write another certificate from the same votes into the folder `out`; return its document.

    `changes` are fields of the family's claim settings, e.g. `failure_prob` or `patch_sizes`; a
    field that is not given, or None, keeps its value. Nothing is written unless the votes are those
    of the old certificate and the new settings are valid.
    """
    folder = certificate_folder(path)
    if out.resolve() == folder.resolve():
        raise CasemateError("out", out, "holds the original certificate; choose another folder")
    document = read_document(folder)
    votes = read_votes(folder / VOTES_NAME)
    header = votes.header.to_dict()
    if votes.sha256 != document.get("votes_sha256") or header != document["evidence"]:
        differences = _compare_values(document["evidence"], header, "evidence")
        reason = "; ".join(differences) or "its digest differs"
        raise CasemateError(
            "votes", folder / VOTES_NAME, f"is not what the certificate was made from: {reason}"
        )
    given = {name: value for name, value in changes.items() if value is not None}
    claim = check_claim(votes.header, document["claim"] | given)
    family_of(votes.header.kind).check_new_claim(votes.header, claim)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = f"cannot be made a folder ({error.strerror}); choose another"
        raise CasemateError("out", out, remedy) from error
    with atomic(out / VOTES_NAME) as temporary:
        shutil.copyfile(folder / VOTES_NAME, temporary)
    return write_certificate(out, votes, claim)


def certificate_folder(path: Path) -> Path:
    """The folder of a certificate, given the folder or one of its files."""
    if path.is_dir():
        return path
    if path.name in (CERTIFICATE_NAME, CERTIFICATES_NAME, VOTES_NAME) and path.is_file():
        return path.parent
    raise CasemateError(
        "path", path, f"is neither a folder with a certificate nor a {CERTIFICATE_NAME} that exists"
    )


def read_document(folder: Path) -> dict[str, Any]:
    """The content of certificate.json; raises if a field needed by the other checks is missing."""
    path = folder / CERTIFICATE_NAME
    if not path.is_file():
        raise CasemateError("file", path, "does not exist; name the folder of a certificate")
    try:
        document = parse_json(path.read_bytes())
    except ValueError as error:
        raise CasemateError("file", path, f"is truncated or damaged: {error}") from error
    if not isinstance(document, dict) or document.get("format_version") != FORMAT_VERSION:
        raise CasemateError("file", path, f"is not a certificate of format {FORMAT_VERSION}")
    for name in ("threat", "claim", "evidence"):
        if not isinstance(document.get(name), dict):
            raise CasemateError("file", path, f"lacks the field {name}")
    return document


def _compare_values(stored: object, expected: object, where: str) -> Iterator[str]:
    """Differences between two JSON values, each with the dotted place where it was found."""
    if isinstance(stored, dict) and isinstance(expected, dict):
        for name in sorted(stored.keys() | expected.keys()):
            place = f"{where}: {name}" if where == CERTIFICATE_NAME else f"{where}.{name}"
            if name not in stored or name not in expected:
                yield f"{place} is {'unexpected' if name in stored else 'missing'}"
            else:
                yield from _compare_values(stored[name], expected[name], place)
    elif isinstance(stored, list) and isinstance(expected, list) and len(stored) == len(expected):
        for index, (left, right) in enumerate(zip(stored, expected, strict=True)):
            yield from _compare_values(left, right, f"{where}[{index}]")
    elif stored != expected or type(stored) is not type(expected):
        yield f"{where} is {stored!r}, should be {expected!r}"


def _compare_rows(stored: list[Row], expected: list[Row]) -> Iterator[str]:
    """Differences between the stored claims and the recomputed ones, by item and column."""
    claims = {row["item_id"]: row for row in stored}
    if len(claims) < len(stored):
        yield f"{CERTIFICATES_NAME}: {len(stored) - len(claims)} rows repeat an item"
    for item_id in sorted(claims.keys() - {row["item_id"] for row in expected}):
        yield f"item {item_id}: has a certificate but no votes"
    for row in expected:
        item_id = row["item_id"]
        if item_id not in claims:
            yield f"item {item_id}: has votes but no certificate"
            continue
        for column, value in row.items():
            if (claimed := claims[item_id][column]) != value:
                yield f"item {item_id}: {column} is {claimed!r}, the votes give {value!r}"
