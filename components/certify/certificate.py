"""Certificates derived from votes: a table with one row per item and a JSON document beside it.

No model is needed: other patch sizes, another rule or failure probability need the votes only. The
time and the machine are not recorded, so that the same votes and settings give the same bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from components.certify.claim_rows import CERTIFICATE_NAME, CERTIFICATES_NAME
from components.certify.header import VotesHeader
from components.certify.registry import family_of
from components.certify.settings import ClaimSettings
from components.certify.vote_rows import VOTES_NAME, Votes
from components.core.digests import digest_file
from components.core.errors import CasemateError
from components.core.files import write_json
from components.core.tables import write_table
from components.core.threats import describe

FORMAT_VERSION = 1
Summary = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateDocument:
    """The content of certificate.json: threat, claim, evidence, digests, summary."""

    kind: str
    threat: Mapping[str, Any]
    claim: Mapping[str, Any]
    evidence: VotesHeader
    votes_sha256: str
    certificates_sha256: str
    sound: bool
    summary: Mapping[str, Any]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CertificateDocument":
        """The document from JSON values; all fields must be present."""
        names = ("kind", "threat", "claim", "votes_sha256", "certificates_sha256", "summary")
        known = {name: values[name] for name in names}
        evidence = VotesHeader.from_dict(values["evidence"])
        return cls(evidence=evidence, sound=bool(values["sound"]), **known)

    def to_dict(self) -> dict[str, object]:
        """The document as JSON values."""
        return {
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "threat": dict(self.threat),
            "claim": dict(self.claim),
            "evidence": self.evidence.to_dict(),
            "votes_sha256": self.votes_sha256,
            "certificates_sha256": self.certificates_sha256,
            "sound": self.sound,
            "summary": dict(self.summary),
        }


def check_claim(header: VotesHeader, claim: Mapping[str, object]) -> ClaimSettings:
    """The claim in canonical form, or an error that names the bad setting.

    A setting that the family of the votes does not have would be ignored, so it is rejected.
    """
    family = family_of(header.kind)
    needed, optional = family.claim_names()
    for name in claim:
        if name not in (*needed, *optional):
            raise CasemateError(f"certify.{name}", claim[name], f"does not apply to {header.kind}")
    for name in needed:
        if name not in claim:
            remedy = f"is missing; {header.kind} needs it"
            raise CasemateError(f"certify.{name}", "", remedy)
    checked: ClaimSettings = family.check_claim(header, claim)
    return checked


def derive(votes: Votes, **claim: object) -> tuple[pa.Table, Summary]:
    """The certificate table and its summary; `claim` is checked by `check_claim`.

    Accuracies divide by all items, abstentions included; each carries its exact 95% interval.
    """
    derived = family_of(votes.header.kind).derive(votes, check_claim(votes.header, claim))
    return derived.table, derived.summary


def describe_certificate(
    votes: Votes, claim: ClaimSettings, summary: Summary, *, certificates_sha256: str
) -> CertificateDocument:
    """The certificate document of a claim derived from votes."""
    header, written = votes.header, claim.to_dict()
    family = family_of(header.kind)
    return CertificateDocument(
        kind=header.kind,
        threat=describe(family.threat(header, claim)),
        claim=written,
        evidence=header,
        votes_sha256=votes.sha256,
        certificates_sha256=certificates_sha256,
        sound=family.is_sound(written),
        summary=summary,
    )


def write_certificate(
    folder: Path, votes: Votes, claim: Mapping[str, object] | ClaimSettings
) -> CertificateDocument:
    """Write certificates.parquet, then certificate.json, beside the votes; return the latter.

    The JSON file is written last and contains the digest of the table: an interrupted write is
    detected.
    """
    stored = folder / VOTES_NAME
    if not stored.is_file() or digest_file(stored) != votes.sha256:
        raise CasemateError("votes", stored, "is missing or not the file that was read")
    given = claim.to_dict() if isinstance(claim, ClaimSettings) else claim
    checked = check_claim(votes.header, given)
    derived = family_of(votes.header.kind).derive(votes, checked)
    write_table(folder / CERTIFICATES_NAME, derived.table)
    document = describe_certificate(
        votes,
        checked,
        derived.summary,
        certificates_sha256=digest_file(folder / CERTIFICATES_NAME),
    )
    write_json(folder / CERTIFICATE_NAME, document.to_dict())
    return document
