"""Certify test items: votes (the evidence), certificates derived, then an attack on the claim."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from components.certify.certificate import write_certificate
from components.certify.l2.claims import check_can_reach
from components.certify.l2.evidence import declare, plan_of
from components.certify.l2.settings import GaussianSettings
from components.certify.patch.early_stop import ORDER
from components.certify.patch.settings import AblationSettings, DoubleMaskingSettings, PatchSettings
from components.certify.patch.thinning import thin_votes
from components.certify.settings import CertificateSettings
from components.certify.votes import (
    VOTES_NAME,
    VoteRow,
    Votes,
    check_can_store,
    read_votes,
    write_votes,
)
from components.core.digests import digest_json
from components.core.errors import CasemateError
from components.core.files import rename
from components.core.seeding import noise_impl
from components.core.settings import plain
from components.data.prepared import PreparedDataset
from components.denoising.loading import describe_source, folder_of
from components.models.checkpoint import read_header
from components.models.spec import ModelSpec
from components.models.voting import Way
from pipelines.recipe import build, denoisers
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.artifacts import StageDir, software
from pipelines.runtime.parts import PartStore
from pipelines.runtime.progress import say
from pipelines.runtime.shards import run_units
from pipelines.stages.certify import challenge
from pipelines.stages.certify.draws import DrawLedger
from pipelines.stages.certify.worker import (
    VoteConfig,
    choose_way,
    denoiser_settings,
    make_voter,
    plan_votes,
    rules_of,
)

TRAINED_SHAPE = {"columns": "column", "rows": "row", "blocks": "block"}  # of the objectives


def run(recipe: Recipe, inputs: Mapping[str, Path], out: StageDir) -> None:
    """Collect the missing votes, derive the certificate, challenge it."""
    entry = recipe.certificates()[out.part]
    section, dataset = entry.section, PreparedDataset.open(inputs["prepare"])
    for name, other in recipe.certificates().items():  # all before the first votes are paid for
        _check_sizes(other.section, dataset, key=f"certify.{name}")
    model = build.model_folder(inputs, section.model)
    config = VoteConfig(
        inputs["prepare"],
        model,
        section,
        _band(section, model, key=f"certify.{out.part}"),
        recipe.seed,
        build.actor_device(recipe.cluster),
        _token_policy(section, model, key=f"certify.{out.part}"),
        denoiser=denoisers.of_certificate(section, out.part, inputs),
    )
    _check_model(config, dataset, key=f"certify.{out.part}")
    source = read_votes(inputs[f"certify.{entry.finer}"] / VOTES_NAME) if entry.finer else None
    way = _way(config, step=out.step) if source is None else _way_of(source)
    config = replace(config, way=way)
    num_items = min(section.num_items or dataset.splits["test"], dataset.splits["test"])
    header = _header(config, dataset, num_items=num_items, run_id=out.fingerprint)
    _check_reach(section, header)
    check_can_store(header)
    if source is not None:
        votes = _thinned(source, header, out)
    else:
        votes = _voted(recipe, config, header, out)
    document = write_certificate(out.path, votes, _claim(section))
    _track(out, document)
    if section.challenge:
        _challenge(recipe, config, votes, out)
    if isinstance(section, GaussianSettings):
        _publish(recipe, config, section, dataset, out)


def _voted(recipe: Recipe, config: VoteConfig, header: Mapping[str, Any], out: StageDir) -> Votes:
    """Ask for the votes that are not there yet, on the cluster; keep them all in one file."""
    units = plan_votes(config, num_items=header["num_items"])
    parts = PartStore(out.scratch / "votes", run_id=digest_json(header))
    gaussian = config.section if isinstance(config.section, GaussianSettings) else None
    draws = DrawLedger(gaussian, header) if gaussian else None
    run_units(
        units,
        make=make_voter,
        config=config,
        parts=parts,
        cluster=recipe.cluster,
        label=out.step,
        source=draws,
    )
    rows = draws.rows(parts) if draws else _rows(parts, [u.name for u in units])
    return write_votes(out.path / VOTES_NAME, rows, header)


def _thinned(source: Votes, header: Mapping[str, Any], out: StageDir) -> Votes:
    """The votes of a coarser stride, out of the finished ones of a finer stride."""
    settings = header["settings"] | {"asked_stride": source.header["settings"]["stride"]}
    own = {**header, "settings": settings}
    return write_votes(out.path / VOTES_NAME, thin_votes(source, own), own)


def _way_of(votes: Votes) -> Way:
    """How finished votes were computed; a coarser stride that takes them does not choose again."""
    return Way(**votes.header["settings"]["way"])


def _band(section: CertificateSettings, model: Path, *, key: str) -> int | None:
    """Pixels that an ablation keeps: as written, else what the model was trained with."""
    if not isinstance(section, AblationSettings):
        return None
    trained = read_header(model)["spec"]["trained_for"]
    shape, size = trained.get("shape"), trained.get("size")
    if trained.get("kind") == "columns":
        shape, size = "column", trained.get("band")
    band = section.band or (size if shape == TRAINED_SHAPE.get(section.kind) else None)
    if band is None:
        remedy = f"is needed: model {section.model} was not trained on this kind, {section.kind}"
        raise CasemateError(f"{key}.band", None, remedy)
    return int(band)


def _token_policy(section: CertificateSettings, model: Path, *, key: str) -> str | None:
    """What happens to hidden tokens: as in training, unless the recipe insists."""
    if not isinstance(section, PatchSettings):
        return None
    trained = str(read_header(model)["spec"]["token_policy"])
    if section.token_policy in ("as_trained", trained):
        return trained
    if not section.allow_token_mismatch:
        remedy = (
            f"is not how model {section.model} was trained ({trained}) and costs certified "
            "accuracy; add allow_token_mismatch: true to certify it so all the same"
        )
        raise CasemateError(f"{key}.token_policy", section.token_policy, remedy)
    return section.token_policy


def _way(config: VoteConfig, *, step: str) -> Way:
    """How ablations vote; a line where the fast path does not fit the model."""
    way = choose_way(config)
    if way.path == "plain":
        say(
            f"{step}: the fast path gives other logits than the plain one for this model; "
            "votes take the plain path, in float32"
        )
    return way


def _check_sizes(section: CertificateSettings, dataset: PreparedDataset, *, key: str) -> None:
    """Refuse lengths that do not fit into the images; a band as trained fitted in training."""
    side = min(dataset.height, dataset.width)
    for name, value in section.lengths():
        if value > side:
            raise CasemateError(f"{key}.{name}", value, f"is larger than the image ({side})")


def _check_reach(section: CertificateSettings, header: Mapping[str, Any]) -> None:
    """Refuse radii that no votes could certify, before any is cast."""
    if not isinstance(section, GaussianSettings):
        return
    if section.method == "sequential":
        plan_of(header)  # a plan that can never certify cannot be made
        return
    check_can_reach(
        section.radii,
        sigma=section.sigma,
        n=section.num_estimate,
        alpha=section.failure_prob,
        randomized=section.method == "randomized",
    )


def _check_model(config: VoteConfig, dataset: PreparedDataset, *, key: str) -> None:
    """Refuse a model, or a denoiser in front of it, that these images do not fit."""
    spec = ModelSpec.from_dict(read_header(config.model)["spec"])
    spec.check_classes(len(dataset.classes))
    if config.denoiser is None:
        spec.check_image((dataset.channels, dataset.height, dataset.width))
        return
    assert isinstance(config.section, GaussianSettings)
    found = describe_source(config.denoiser)
    denoisers.check_sigma(f"{key}.sigma", config.section.sigma, found.diffusion)
    for channels in (dataset.channels, spec.channels):
        denoisers.check_channels(f"{key}.denoiser", found.channels, channels)
    if dataset.height != dataset.width:
        remedy = "is not square; denoisers are fed square images"
        raise CasemateError("data.image_size", f"{dataset.height}x{dataset.width}", remedy)


def _header(
    config: VoteConfig, dataset: PreparedDataset, *, num_items: int, run_id: str
) -> dict[str, Any]:
    """Which model voted on which data under which settings; no time and no place."""
    section, model = config.section, read_header(config.model)
    settings = {
        "micro_batch": section.micro_batch,
        "device": config.device,
        **_vote_settings(config, trained_policy=model["spec"]["token_policy"]),
    }
    return {
        "kind": section.kind,
        "run_id": run_id,
        "model_digest": model["digest"],
        "dataset_digest": dataset.digest,
        "num_classes": len(dataset.classes),
        "image": {"channels": dataset.channels, "height": dataset.height, "width": dataset.width},
        "settings": settings,
        "noise_impl": noise_impl(section.method) if isinstance(section, GaussianSettings) else None,
        "num_items": num_items,
        "software": {
            k: v
            for k, v in software().items()
            if k in ("casemate", "torch", "timm", "numpy", "scipy")
        },
    }


def _vote_settings(config: VoteConfig, *, trained_policy: str) -> dict[str, Any]:
    """What the votes depend on beside model and data."""
    section = config.section
    if isinstance(section, GaussianSettings):
        drawn = {
            "sigma": section.sigma,
            "num_select": section.num_select,
            "num_estimate": section.num_estimate,
            "run_seed": config.seed,
            "method": section.method,
        }
        declared = {"declared": _declared(section)} if section.method == "sequential" else {}
        return drawn | declared | denoiser_settings(config)
    settings: dict[str, Any] = {"token_policy": config.token_policy, "fill": "black"}
    if config.token_policy != trained_policy:
        settings["trained_token_policy"] = trained_policy
    if isinstance(section, DoubleMaskingSettings):
        return settings | {"mask_patch": section.mask_patch, "num_masks": section.num_masks}
    assert isinstance(section, AblationSettings)
    settings |= {"band": config.band, "stride": section.stride, "way": asdict(config.way)}
    if section.stop_early:
        settings["stopped_for"] = {
            "patch_sizes": sorted(set(section.patch_sizes)),
            "rules": rules_of(section),
            "order": ORDER,
        }
    return settings


def _declared(section: GaussianSettings) -> dict[str, Any]:
    return declare(
        radii=list(section.radii),
        failure_prob=section.failure_prob,
        look_every=section.look_every,
        futility_prob=section.futility_prob,
    )


def _claim(section: CertificateSettings) -> dict[str, Any]:
    if isinstance(section, GaussianSettings):
        return {"failure_prob": section.failure_prob, "radii": section.radii}
    if isinstance(section, DoubleMaskingSettings):
        return {"patch_sizes": section.patch_sizes}
    keys = ("patch_sizes", "rule", "second_rule", "delta_rule")
    return {key: getattr(section, key) for key in keys}


def _rows(parts: PartStore, units: list[str]) -> Iterator[VoteRow]:
    for table in parts.tables(units):
        for row in table.to_pylist():
            yield VoteRow(**{**row, "predictions": np.array(row["predictions"], np.uint16)})


def _track(out: StageDir, document: Mapping[str, Any]) -> None:
    summary, prefix = document["summary"], f"certify/{out.part}"
    values = {f"{prefix}/standard_accuracy": summary["standard_accuracy"]["value"]}
    for entry in summary["certified"]:
        at = _radius_name(entry["radius"]) if "radius" in entry else str(entry["patch_size"])
        for name in ("accuracy", "accuracy_loc"):
            if name in entry:
                values[f"{prefix}/{name}_at_{at}"] = entry[name]["value"]
    for name in ("ablation_accuracy", "votes_asked", "prediction_accuracy"):
        if name in summary:
            values[f"{prefix}/{name}"] = summary[name]["value"]
    if "average_certified_radius" in summary:
        values[f"{prefix}/average_certified_radius"] = summary["average_certified_radius"]
    if "draws_used" in summary:
        values[f"{prefix}/draws_used"] = summary["draws_used"]["mean"]
    out.run.metrics(values)
    out.run.tags({f"{prefix}/sound": document["sound"]})
    out.run.artifacts(
        *(out.path / name for name in (VOTES_NAME, "certificates.parquet", "certificate.json"))
    )


def _radius_name(radius: float) -> str:
    """Two decimals, or all digits where there are more: no two radii share a metric."""
    short = f"{radius:.2f}"
    return short if float(short) == radius else repr(float(radius))


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
        rename(out.path / "certificate.json", "certificate.refuted.json")  # not to be used
        raise RuntimeError(
            f"{result['broken_certified']} certified item(s) of {out.step} fell to "
            f"{result['attack']}: {', '.join(result['broken_items'])}; "
            "the certificate is wrong, do not use it"
        )


def _publish(
    recipe: Recipe,
    config: VoteConfig,
    section: GaussianSettings,
    dataset: PreparedDataset,
    out: StageDir,
) -> None:
    """The smoothed classifier in the registry: what was certified, ready to be asked."""
    keys = ("sigma", "num_select", "num_estimate", "failure_prob", "micro_batch")
    out.run.register_smoothed(
        name=f"{recipe.name}-{out.part}-smoothed",
        alias="candidate",
        classifier=config.model,
        denoiser=folder_of(config.denoiser) if config.denoiser else None,
        settings={
            **{key: getattr(section, key) for key in keys},
            "sampler": plain(section.sampler),
            "channels": dataset.channels,
            "image_size": dataset.width,
        },
        metadata={"digest": read_header(config.model)["digest"], "fingerprint": out.fingerprint},
    )
