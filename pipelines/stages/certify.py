"""Certify test items: votes (the evidence), certificates derived, then an attack on the claim."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from components.certify.certificate import write_certificate
from components.certify.gaussian import check_can_certify
from components.certify.votes import VOTES_NAME, VoteRow, Votes, write_votes
from components.core.digests import digest_json
from components.core.errors import CasemateError
from components.core.seeding import NOISE_IMPL
from components.data.prepared import PreparedDataset
from components.models.checkpoint import read_header
from pipelines import build
from pipelines.recipe import Recipe
from pipelines.runtime.artifacts import StageDir, software
from pipelines.runtime.parts import PartStore
from pipelines.runtime.shards import run_units
from pipelines.sections import ColumnsCertify, GaussianCertify
from pipelines.stages import challenge
from pipelines.stages.voting import VoteConfig, make_voter, plan_votes


def run(recipe: Recipe, inputs: Mapping[str, Path], out: StageDir) -> None:
    """Collect the missing votes, derive the certificate, challenge it."""
    section = recipe.certify[out.part]
    dataset = PreparedDataset.open(inputs["prepare"])
    model = inputs[f"train.{section.model}"] / "model"
    config = VoteConfig(
        inputs["prepare"],
        model,
        section,
        _band(section, model, dataset, out.part),
        recipe.seed,
        build.actor_device(recipe.cluster),
    )
    if isinstance(section, GaussianCertify):
        check_can_certify(n=section.num_estimate, alpha=section.failure_prob)
    num_items = min(section.num_items or dataset.splits["test"], dataset.splits["test"])
    units = plan_votes(section, num_items=num_items)
    header = _header(config, dataset, num_items=num_items, run_id=out.fingerprint)
    parts = PartStore(out.scratch / "votes", run_id=digest_json(header))
    run_units(
        units, make=make_voter, config=config, parts=parts, cluster=recipe.cluster, label=out.step
    )
    votes = write_votes(out.path / VOTES_NAME, _rows(parts, [u.name for u in units]), header)
    document = write_certificate(out.path, votes, _claim(section))
    _track(out, document)
    if section.challenge:
        _challenge(recipe, config, votes, out)


def _band(section: Any, model: Path, dataset: PreparedDataset, part: str) -> int | None:
    """The width of the column band: as written, else what the model was trained with."""
    if not isinstance(section, ColumnsCertify):
        return None
    trained = read_header(model)["spec"]["trained_for"]
    columns = trained.get("kind") == "ablation" and trained.get("shape") == "column"
    band = section.band or trained.get("band") or (trained.get("size") if columns else None)
    if band is None:
        raise CasemateError(
            f"certify.{part}.band",
            None,
            f"is needed: model {section.model} was not trained on column bands",
        )
    asked = (("band", band), ("stride", section.stride), ("patch_sizes", max(section.patch_sizes)))
    for key, value in asked:
        if value > dataset.width:
            raise CasemateError(
                f"certify.{part}.{key}", value, f"is wider than the image ({dataset.width})"
            )
    return int(band)


def _header(
    config: VoteConfig, dataset: PreparedDataset, *, num_items: int, run_id: str
) -> dict[str, Any]:
    """Which model voted on which data under which settings; no time and no place."""
    section, model = config.section, read_header(config.model)
    settings: dict[str, Any] = {"micro_batch": section.micro_batch, "device": config.device}
    if isinstance(section, ColumnsCertify):
        policy = model["spec"]["token_policy"]
        settings |= {
            "band": config.band,
            "stride": section.stride,
            "token_policy": policy,
            "fill": "black",
        }
    else:
        settings |= {
            "sigma": section.sigma,
            "num_select": section.num_select,
            "num_estimate": section.num_estimate,
            "run_seed": config.seed,
        }
    return {
        "kind": section.kind,
        "run_id": run_id,
        "model_digest": model["digest"],
        "dataset_digest": dataset.digest,
        "num_classes": len(dataset.classes),
        "image": {"channels": dataset.channels, "height": dataset.height, "width": dataset.width},
        "settings": settings,
        "noise_impl": NOISE_IMPL if isinstance(section, GaussianCertify) else None,
        "num_items": num_items,
        "software": {
            k: v
            for k, v in software().items()
            if k in ("casemate", "torch", "timm", "numpy", "scipy")
        },
    }


def _claim(section: ColumnsCertify | GaussianCertify) -> dict[str, Any]:
    if isinstance(section, ColumnsCertify):
        return {"patch_sizes": section.patch_sizes, "rule": section.rule}
    return {"failure_prob": section.failure_prob, "radii": section.radii}


def _rows(parts: PartStore, units: list[str]) -> Iterator[VoteRow]:
    for table in parts.tables(units):
        for row in table.to_pylist():
            yield VoteRow(**{**row, "predictions": np.array(row["predictions"], np.uint16)})


def _track(out: StageDir, document: Mapping[str, Any]) -> None:
    summary, prefix = document["summary"], f"certify/{out.part}"
    values = {f"{prefix}/standard_accuracy": summary["standard_accuracy"]["value"]}
    for entry in summary["certified"]:
        at = f"{entry['radius']:.2f}" if "radius" in entry else str(entry["patch_size"])
        values[f"{prefix}/accuracy_at_{at}"] = entry["accuracy"]["value"]
    if "average_certified_radius" in summary:
        values[f"{prefix}/average_certified_radius"] = summary["average_certified_radius"]
    out.run.metrics(values)
    out.run.artifacts(
        *(out.path / name for name in (VOTES_NAME, "certificates.parquet", "certificate.json"))
    )


def _challenge(recipe: Recipe, config: VoteConfig, votes: Votes, out: StageDir) -> None:
    """Attack some items within the claimed threat; a certified one that falls fails the stage."""
    result = challenge.run(recipe, config, votes, out)
    out.write_json("challenge.json", result)
    out.run.metrics(
        {
            f"certify/{out.part}/challenge/certified": result["certified"]["value"],
            f"certify/{out.part}/challenge/standing": result["standing"]["value"],
        }
    )
    out.run.artifacts(out.path / "challenge.json")
    if result["broken_certified"]:
        claim = out.path / "certificate.json"
        claim.replace(claim.with_name("certificate.refuted.json"))  # not to be taken for valid
        raise RuntimeError(
            f"{result['broken_certified']} certified item(s) of {out.step} fell to "
            f"{result['attack']}: {', '.join(result['broken_items'])}; "
            "the certificate is wrong, do not use it"
        )
