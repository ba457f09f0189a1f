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

from components.certify.ablations import num_touched
from components.certify.bounds import max_radius
from components.certify.gaussian import certify_counts, check_can_certify
from components.certify.patch import RULES, certify_columns
from components.certify.votes import VOTES_NAME, ItemVotes, Votes, replace_file, write_table
from components.core.digests import digest_file
from components.core.errors import CasemateError
from components.core.threats import L2Threat, PatchThreat, describe
from components.evaluate.accuracy import accuracy

FORMAT_VERSION = 1
CERTIFICATES_NAME = "certificates.parquet"
CERTIFICATE_NAME = "certificate.json"
SETTINGS = {"columns": ("patch_sizes", "rule"), "gaussian": ("failure_prob", "radii")}
ITEM_FIELDS = [
    ("item_id", pa.string()),
    ("label", pa.int32()),
    ("image_sha256", pa.string()),
    ("prediction", pa.int32()),
    ("abstain", pa.bool_()),
    ("correct", pa.bool_()),
]
SCHEMAS = {
    "columns": pa.schema(
        [
            *ITEM_FIELDS,
            ("top_votes", pa.int32()),
            ("runner_up", pa.int32()),
            ("runner_up_votes", pa.int32()),
            ("margin", pa.int32()),
            ("certified_patch_sizes", pa.list_(pa.int32())),
        ]
    ),
    "gaussian": pa.schema(
        [
            *ITEM_FIELDS,
            ("n0", pa.int32()),
            ("n", pa.int32()),
            ("k", pa.int32()),
            ("p_lower", pa.float64()),
            ("radius", pa.float64()),
        ]
    ),
}
Summary = dict[str, Any]


def check_settings(header: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a claim in their one written form, or an error that names the bad one.

    Columns take `patch_sizes` and `rule`; gaussian takes `failure_prob` and `radii`. A setting of
    the other kind would be ignored, so it is refused.
    """
    kind = header["kind"]
    for name in settings:
        if name not in SETTINGS[kind]:
            raise CasemateError(f"certify.{name}", settings[name], f"does not apply to {kind}")
    for name in SETTINGS[kind]:
        if name not in settings:
            raise CasemateError(f"certify.{name}", "nothing", f"was given, but {kind} needs it")
    return (
        _check_columns(header, settings) if kind == "columns" else _check_gaussian(header, settings)
    )


def _check_columns(header: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    side = min(header["image"]["height"], header["image"]["width"])
    sizes = settings["patch_sizes"]
    if not isinstance(sizes, Sequence) or not sizes:
        raise CasemateError("certify.patch_sizes", sizes, "is not a list of sizes in pixels")
    for size in sizes:
        if not isinstance(size, int) or not 1 <= size <= side:
            raise CasemateError("certify.patch_sizes", size, f"is not in 1..{side} pixels")
    if settings["rule"] not in RULES:
        raise CasemateError("certify.rule", settings["rule"], f"is not one of {', '.join(RULES)}")
    return {"patch_sizes": sorted(set(sizes)), "rule": settings["rule"]}


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
    """The certificate table and its summary: `patch_sizes=, rule=` or `failure_prob=, radii=`.

    Accuracies divide by all items, abstentions included; each carries its exact 95% interval.
    """
    checked = check_settings(votes.header, settings)
    derive_kind = _derive_columns if votes.header["kind"] == "columns" else _derive_gaussian
    rows, summary = derive_kind(votes, checked)
    schema = SCHEMAS[votes.header["kind"]]
    columns = [pa.array([row[field.name] for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema), summary


def _derive_columns(
    votes: Votes, settings: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], Summary]:
    header, sizes = votes.header, settings["patch_sizes"]
    shape = {"image_width": header["image"]["width"]} | {
        name: header["settings"][name] for name in ("band", "stride")
    }
    items = list(votes.items())
    claims = certify_columns(
        np.stack([item.streams["columns"] for item in items]),
        num_classes=header["num_classes"],
        patch_sizes=sizes,
        rule=settings["rule"],
        **shape,
    )
    rows = [
        _item_fields(item, int(claims.prediction[i]))
        | {
            "top_votes": claims.top_votes[i],
            "runner_up": claims.runner_up[i],
            "runner_up_votes": claims.runner_up_votes[i],
            "margin": claims.margin[i],
            "certified_patch_sizes": np.array(sizes)[claims.certified[i]].tolist(),
        }
        for i, item in enumerate(items)
    ]
    correct = np.array([row["correct"] for row in rows])
    certified = [
        {
            "patch_size": size,
            "num_touched": num_touched(patch=size, **shape),
            "accuracy": accuracy(correct & claims.certified[:, column]),
        }
        for column, size in enumerate(sizes)
    ]
    return rows, {
        "num_items": len(rows),
        "standard_accuracy": accuracy(correct),
        "certified": certified,
    }


def _derive_gaussian(
    votes: Votes, settings: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], Summary]:
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
            _item_fields(item, claim.prediction)
            | {name: getattr(claim, name) for name in ("n0", "n", "k", "p_lower", "radius")}
        )
    correct = np.array([row["correct"] for row in rows])
    radius = np.array([row["radius"] for row in rows])
    certified = [
        {"radius": r, "accuracy": accuracy(correct & (radius >= r))} for r in settings["radii"]
    ]
    return rows, {
        "num_items": len(rows),
        "standard_accuracy": accuracy(correct),  # at radius 0: correct and not abstained
        "abstain_rate": accuracy(np.array([row["abstain"] for row in rows])),
        "average_certified_radius": math.fsum(radius[correct]) / len(rows),
        "max_radius": max_radius(sigma=sigma, n=header["settings"]["num_estimate"], alpha=alpha),
        "certified": certified,
    }


def _item_fields(item: ItemVotes, prediction: int) -> dict[str, Any]:
    return {
        "item_id": item.item_id,
        "label": item.label,
        "image_sha256": item.image_sha256,
        "prediction": prediction,
        "abstain": prediction < 0,
        "correct": prediction == item.label,
    }


def describe_certificate(
    votes: Votes, settings: Mapping[str, Any], summary: Summary, *, certificates_sha256: str
) -> dict[str, Any]:
    """The content of certificate.json: threat, claim, evidence, digests, summary."""
    header = votes.header
    threat = (
        PatchThreat(patch_sizes=tuple(settings["patch_sizes"]))
        if header["kind"] == "columns"
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
        "sound": True,  # every rule on offer is proven; an unsound one would have to say False
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
