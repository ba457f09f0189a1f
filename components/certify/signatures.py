"""Signed certificates: an in-toto statement about their files in a DSSE envelope, by ed25519.

The statement lists every file with its digest, and says what is certified. It has no time and
names no machine: the same certificate and key give the same bytes. Signatures and envelope are
those of `securesystemslib`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error
from securesystemslib.signer import CryptoSigner, SSlibKey

from components.certify.certificate import CertificateDocument
from components.certify.claim_rows import CERTIFICATE_NAME, CERTIFICATES_NAME
from components.certify.registry import family_of
from components.certify.vote_rows import VOTES_NAME
from components.core.digests import canonical_json
from components.core.files import json_text

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:casemate:certificate:v1"
EVIDENCE = (VOTES_NAME, CERTIFICATES_NAME, CERTIFICATE_NAME)  # files of every certificate
MAX_BYTES = 2**24  # of a signature's file
WORDS = ("in_words", "threat_in_words")  # may be phrased anew without a new predicate type

SHOWN_NAMES, SHOWN_LENGTH = 8, 80  # in a message

Digests = Mapping[str, str]  # SHA-256 by file name
Statement = dict[str, Any]


class SignatureError(Exception):
    """A signature that does not hold; the message is a sentence about it."""


def statement_of(digests: Digests, document: CertificateDocument) -> Statement:
    """The in-toto statement about a certificate, whose files have these digests."""
    return {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": name, "digest": {"sha256": digests[name]}} for name in sorted(digests)
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate_of(document),
    }


def predicate_of(document: CertificateDocument) -> dict[str, Any]:
    """What is certified, as JSON values."""
    family, evidence, summary = family_of(document.kind), document.evidence, document.summary
    doubt = {} if document.sound else {"not_sound_because": family.unsound_words}
    return {
        "kind": document.kind,
        "threat": dict(document.threat),
        "threat_in_words": family.threat_words(document.threat),
        "claim": dict(document.claim),
        "sound": document.sound,
        **doubt,
        "model_digest": evidence.model_digest,
        "dataset_digest": evidence.dataset_digest,
        "num_items": evidence.num_items,
        "standard_accuracy": summary["standard_accuracy"],
        "certified": summary["certified"],
        "in_words": [
            f"{family.budget_text(entry)}: {_count(entry['accuracy'])} items are classified "
            "correctly and certified"
            for entry in summary["certified"]
        ],
        "run_id": evidence.run_id,
        "software": dict(evidence.software),
    }


def _count(share: Mapping[str, Any]) -> str:
    return f"{round(share['value'] * share['num_items'])} of {share['num_items']}"


def sign_statement(statement: Statement, signer: CryptoSigner) -> bytes:
    """The content of a signature's file."""
    envelope = Envelope(canonical_json(statement).encode(), PAYLOAD_TYPE, {})
    envelope.sign(signer)
    return json_text(envelope.to_dict()).encode()


def signed_statement(content: bytes, key: SSlibKey) -> Statement:
    """The statement in a signature's file, if this key signed it; else `SignatureError`."""
    envelope = _envelope(content)
    if len(envelope.signatures) != 1:
        raise SignatureError(f"holds {len(envelope.signatures)} signatures, not one")
    if key.keyid not in envelope.signatures:
        raise SignatureError(f"is not of this key ({key.keyid[:16]})")
    try:
        envelope.verify([key], 1)
    except Error as error:
        raise SignatureError("does not match its content: one of them was changed") from error
    if envelope.payload_type != PAYLOAD_TYPE:
        raise SignatureError(f"signs {envelope.payload_type!r}, not {PAYLOAD_TYPE}")
    return _statement(envelope.payload)


def _envelope(content: bytes) -> Envelope:
    """An envelope of any content; nothing in it is trusted yet."""
    try:
        found: Envelope = Envelope.from_dict(json.loads(content))
        found.pae()  # its parts have the right types
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, Error) as error:
        if "Multiple signatures" in str(error):
            raise SignatureError("holds two signatures of one key") from error
        raise SignatureError("is not a DSSE envelope as casemate sign writes it") from error
    return found


def _statement(payload: bytes) -> Statement:
    """A signed statement, if it is one about a certificate."""
    try:
        statement = json.loads(payload)
        digests_of(statement)
        if statement["_type"] == STATEMENT_TYPE and isinstance(statement["predicate"], dict):
            kind = statement["predicateType"]
        else:
            kind = None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SignatureError("does not sign an in-toto statement") from error
    if kind != PREDICATE_TYPE:
        raise SignatureError(f"signs a statement of another type ({kind}), not {PREDICATE_TYPE}")
    found: Statement = statement
    return found


def digests_of(statement: Statement) -> dict[str, str]:
    """Digests of a statement by file name."""
    subjects = statement["subject"]
    found = {str(one["name"]): str(one["digest"]["sha256"]) for one in subjects}
    if len(found) < len(subjects):
        raise ValueError("names a file twice")
    return found


def changed_subjects(statement: Statement, digests: Mapping[str, str | None]) -> str:
    """What differs between the signed files and these, as a sentence; empty: nothing.

    `digests` has None for a file that is missing.
    """
    signed = digests_of(statement)
    parts = {
        "changed since it was signed": [
            n for n in signed if digests.get(n) not in (None, signed[n])
        ],
        "signed and missing": [n for n in signed if digests.get(n) is None],
        "not signed": sorted({*EVIDENCE, *digests} - signed.keys()),
    }
    return "; ".join(f"{_listed(names)}: {what}" for what, names in parts.items() if names)


def _listed(names: Sequence[str]) -> str:
    """File names in one line; those of a forged manifest may be anything."""
    shown = [(name if name.isprintable() else ascii(name))[:SHOWN_LENGTH] for name in names]
    more = len(shown) - SHOWN_NAMES
    return ", ".join(shown[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def changed_predicate(statement: Statement, document: CertificateDocument) -> Iterator[str]:
    """Fields of the statement that say something else than the certificate."""
    signed, expected = statement["predicate"], predicate_of(document)
    for name in sorted({*signed, *expected} - set(WORDS)):
        if signed.get(name) != expected.get(name):
            yield f"{name}: the signed statement differs from {CERTIFICATE_NAME}"
