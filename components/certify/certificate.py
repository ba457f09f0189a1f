"""Certificates derived from votes: a table with one row per item and a page of JSON beside it.

Nothing here asks a model: other patch sizes, another rule or failure probability need the votes
only. No time of day and no machine is recorded, so that the same votes and settings give the same
bytes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from components.certify.bounds import max_radius
from components.certify.claim_rows import ITEM_FIELDS, Derived, item_fields
from components.certify.gaussian import certify_counts, check_can_certify
from components.certify.patch_certificate import (
    check_patch_claim,
    derive_patch,
    is_sound,
    patch_settings,
)
from components.certify.patch_evidence import PATCH_KINDS
from components.certify.votes import VOTES_NAME, Votes, replace_file, write_table
from components.core.digests import digest_file
from components.core.errors import CasemateError
from components.core.threats import L2Threat, PatchThreat, describe
from components.evaluate.accuracy import accuracy

FORMAT_VERSION = 1
CERTIFICATES_NAME = "certificates.parquet"
CERTIFICATE_NAME = "certificate.json"
GAUSSIAN_SETTINGS = ("failure_prob", "radii")
GAUSSIAN_SCHEMA = pa.schema(
    [
        *ITEM_FIELDS,
        ("n0", pa.int32()),
        ("n", pa.int32()),
        ("k", pa.int32()),
        ("p_lower", pa.float64()),
        ("radius", pa.float64()),
    ]
)
Summary = dict[str, Any]


def check_settings(header: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a claim in their one written form, or an error that names the bad one.

    Ablations take `patch_sizes`, `rule` and, if wanted, `delta_rule` and `second_rule`; double
    masking takes `patch_sizes`; gaussian takes `failure_prob` and `radii`. A setting of another
    kind would be ignored, so it is refused.
    """
    kind = header["kind"]
    patch = kind in PATCH_KINDS
    needed, optional = patch_settings(header) if patch else (GAUSSIAN_SETTINGS, ())
    for name in settings:
        if name not in (*needed, *optional):
            raise CasemateError(f"certify.{name}", settings[name], f"does not apply to {kind}")
    for name in needed:
        if name not in settings:
            raise CasemateError(f"certify.{name}", "nothing", f"was given, but {kind} needs it")
    return check_patch_claim(header, settings) if patch else _check_gaussian(header, settings)


def _check_gaussian(header: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    radii, alpha = settings["radii"], settings["failure_prob"]
    if not isinstance(radii, Sequence) or not radii:
        raise CasemateError("certify.radii", radii, "is not a list of l2 distances in pixels")
    for radius in radii:
        if not isinstance(radius, int | float) or not 0 < radius < math.inf:
            raise CasemateError("certify.radii", radius, "is not a positive l2 distance in pixels")
    if not isinstance(alpha, int | float):
        raise CasemateError("certify.failure_prob", alpha, "is not a probability")
    check_can_certify(n=header["settings"]["num_estimate"], alpha=alpha)
    return {"failure_prob": float(alpha), "radii": sorted({float(radius) for radius in radii})}


def derive(votes: Votes, **settings: Any) -> tuple[pa.Table, Summary]:
    """The certificate table and its summary; settings as `check_settings` takes them.

    Accuracies divide by all items, abstentions included; each carries its exact 95% interval.
    """
    checked = check_settings(votes.header, settings)
    kind_of = derive_patch if votes.header["kind"] in PATCH_KINDS else _derive_gaussian
    derived = kind_of(votes, checked)
    return derived.table, derived.summary


def _derive_gaussian(votes: Votes, settings: Mapping[str, Any]) -> Derived:
    """certified accuracy(r) = mean[correct and radius >= r]; ACR = mean[radius * correct]."""
    header, alpha = votes.header, settings["failure_prob"]
    sigma, num_classes = float(header["settings"]["sigma"]), header["num_classes"]
    rows = []
    for item in votes.items():
        select, estimate = (
            np.bincount(item.streams[stream], minlength=num_classes)
            for stream in ("select", "estimate")
        )
        claim = certify_counts(select, estimate, sigma=sigma, alpha=alpha)
        rows.append(
            item_fields(item, claim.prediction)
            | {name: getattr(claim, name) for name in ("n0", "n", "k", "p_lower", "radius")}
        )
    correct = np.array([row["correct"] for row in rows])
    radius = np.array([row["radius"] for row in rows])
    certified = [
        {"radius": r, "accuracy": accuracy(correct & (radius >= r))} for r in settings["radii"]
    ]
    summary = {
        "num_items": len(rows),
        "standard_accuracy": accuracy(correct),  # at radius 0: correct and not abstained
        "abstain_rate": accuracy(np.array([row["abstain"] for row in rows])),
        "average_certified_radius": math.fsum(radius[correct]) / len(rows),
        "max_radius": max_radius(sigma=sigma, n=header["settings"]["num_estimate"], alpha=alpha),
        "certified": certified,
    }
    return Derived(GAUSSIAN_SCHEMA, rows, summary)


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
    replace_file(folder / CERTIFICATE_NAME, lambda temporary: temporary.write_text(text))
    return document
