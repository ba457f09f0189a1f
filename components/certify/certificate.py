"""Certificates derived from votes: a table with one row per item and a page of JSON beside it.

Nothing here asks a model: other patch sizes, another rule or failure probability need the votes
only. No time of day and no machine is recorded, so that the same votes and settings give the same
bytes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from components.certify.l2.certificate import L2_CLAIM, check_l2_claim, derive_l2
from components.certify.patch.certificate import (
    check_patch_claim,
    derive_patch,
    is_sound,
    patch_settings,
)
from components.certify.patch.evidence import PATCH_KINDS
from components.certify.votes import VOTES_NAME, Votes, write_table
from components.core.digests import digest_file
from components.core.errors import CasemateError
from components.core.files import write_text
from components.core.threats import L2Threat, PatchThreat, describe

FORMAT_VERSION = 1
CERTIFICATES_NAME = "certificates.parquet"
CERTIFICATE_NAME = "certificate.json"
Summary = dict[str, Any]


def check_settings(header: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a claim in their one written form, or an error that names the bad one.

    Ablations take `patch_sizes`, `rule` and, if wanted, `delta_rule` and `second_rule`; double
    masking takes `patch_sizes`; gaussian takes `failure_prob` and `radii`. A setting of another
    kind would be ignored, so it is refused.
    """
    kind = header["kind"]
    patch = kind in PATCH_KINDS
    needed, optional = patch_settings(header) if patch else (L2_CLAIM, ())
    for name in settings:
        if name not in (*needed, *optional):
            raise CasemateError(f"certify.{name}", settings[name], f"does not apply to {kind}")
    for name in needed:
        if name not in settings:
            raise CasemateError(f"certify.{name}", "nothing", f"was given, but {kind} needs it")
    return check_patch_claim(header, settings) if patch else check_l2_claim(header, settings)


def derive(votes: Votes, **settings: Any) -> tuple[pa.Table, Summary]:
    """The certificate table and its summary; settings as `check_settings` takes them.

    Accuracies divide by all items, abstentions included; each carries its exact 95% interval.
    """
    checked = check_settings(votes.header, settings)
    kind_of = derive_patch if votes.header["kind"] in PATCH_KINDS else derive_l2
    derived = kind_of(votes, checked)
    return derived.table, derived.summary


def describe_certificate(
    votes: Votes, settings: Mapping[str, Any], summary: Summary, *, certificates_sha256: str
) -> dict[str, Any]:
    """The content of certificate.json: threat, claim, evidence, digests, summary."""
    header = votes.header
    threat = (
        PatchThreat(patch_sizes=tuple(settings["patch_sizes"]))
        if header["kind"] in PATCH_KINDS
        else L2Threat(sigma=float(header["settings"]["sigma"]))
    )
    return {
        "format_version": FORMAT_VERSION,
        "kind": header["kind"],
        "threat": describe(threat),
        "claim": dict(settings),
        "evidence": header,
        "votes_sha256": votes.sha256,
        "certificates_sha256": certificates_sha256,
        "sound": is_sound(settings),
        "summary": summary,
    }


def write_certificate(folder: Path, votes: Votes, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Write certificates.parquet, then certificate.json, beside the votes; return the latter.

    The JSON file comes last and names the digest of the table: a torn pair cannot pass for a
    whole one.
    """
    stored = folder / VOTES_NAME
    if not stored.is_file() or digest_file(stored) != votes.sha256:
        raise CasemateError("votes", stored, "is missing or not the file that was read")
    checked = check_settings(votes.header, settings)
    table, summary = derive(votes, **checked)
    write_table(folder / CERTIFICATES_NAME, table)
    document = describe_certificate(
        votes, checked, summary, certificates_sha256=digest_file(folder / CERTIFICATES_NAME)
    )
    text = json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"
    write_text(folder / CERTIFICATE_NAME, text)
    return document
