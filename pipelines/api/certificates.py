"""Certificates: made in this process, read, verified, derived again, exported."""

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from components.core.errors import CasemateError
from components.core.folders import Folder
from components.core.object_stores import is_uri
from components.core.settings import RUN_SEED
from components.core.shares import shown
from pipelines.api.models import check_model, check_seed
from pipelines.api.places import beside, local_path, opened
from pipelines.api.tables import Accuracy, ProvenAccuracy, frame

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from components.certify.certificate import CertificateDocument
    from components.certify.settings import CertificateSettings
    from components.certify.tasks import DataSource
    from components.certify.verify import VerifyReport
    from components.models.pixels import PixelModel

NOT_HERE = {  # settings of a recipe's certificates that do not apply to one model in memory
    "model": "is the first argument here",
    "sweep": "belongs to recipes; call once for each value",
    "challenge": "belongs to recipes; attack the certificate with casemate certify",
}


@dataclass(frozen=True, slots=True)
class Certificate:
    """A stored certificate: the votes, the claims and their document are files in `folder`."""

    folder: Path
    document: "CertificateDocument"
    data: "DataSource | None" = field(default=None, repr=False)
    """The items it was made from, for `verify(folder, resample=..., data=...)`."""

    @property
    def sound(self) -> bool:
        """False for claims that only reproduce published tables."""
        return self.document.sound

    @property
    def standard_accuracy(self) -> Accuracy:
        """Accuracy of the smoothed classifier without an attack; abstentions count as wrong."""
        return Accuracy(**shown(self.document.summary["standard_accuracy"]))

    @property
    def table(self) -> "pd.DataFrame":
        """One row per item: label, prediction, certified sizes or radius."""
        import pandas as pd

        return pd.read_parquet(self.folder / "certificates.parquet")

    @property
    def certified(self) -> "pd.DataFrame":
        """Certified accuracy at each patch side (pixels) or l2 radius, column `at`."""
        from components.certify.registry import family_of

        family = family_of(self.document.kind)
        return frame(
            {"at": family.budget(entry), **shown(entry["accuracy"])}
            for entry in self.document.summary["certified"]
        )

    def accuracy_at(self, budget: float) -> ProvenAccuracy:
        """Certified accuracy at one of the claimed patch sides or radii."""
        found = self.certified
        rows = found[found["at"] == budget]
        if rows.empty:
            known = ", ".join(f"{at:g}" for at in found["at"])
            raise CasemateError("budget", budget, f"is not claimed; choose one of {known}")
        value, low, high, count = rows.iloc[0][["value", "low", "high", "num_items"]]
        return ProvenAccuracy(float(value), float(low), float(high), int(count))


def load_certificate(path: str | Path) -> Certificate:
    """A stored certificate, from its folder or one of its files; `verify` checks it."""
    from components.certify.certificate import CertificateDocument
    from components.certify.verify import certificate_folder, read_document

    folder = certificate_folder(local_path(path))
    return Certificate(folder, CertificateDocument.from_dict(read_document(folder)))


def certify_patch(
    model: "PixelModel",
    images: "Tensor | str | Path",
    labels: "Tensor | None" = None,
    *,
    patch_sizes: Sequence[int],
    band: int | None = None,
    kind: str = "columns",
    out: str | Path | None = None,
    item_ids: Sequence[str] | None = None,
    **settings: Any,
) -> Certificate:
    """Certify items against one square patch of up to these sides, anywhere in the image.

    `images` may also be the folder of a prepared dataset, which has labels. `band`: pixels that an
    ablation shows, by default as the model was trained. `kind`: columns, rows, blocks, both or
    double_masking. `settings`: further fields of that kind's settings in
    `components/certify/patch/settings.py`, e.g. `stride` or `micro_batch`. The certificate is
    written to the folder `out`, by default one that is removed when the process ends; `verify`
    checks it.

    >>> from pipelines import api
    >>> import torch
    >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
    >>> model = api.load_model(network, image_size=8)
    >>> images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    >>> certificate = api.certify_patch(model, images, torch.tensor([0, 1, 2, 3]),
    ...                                 patch_sizes=[1, 2], band=4)
    >>> certificate.certified["at"].tolist()
    [1, 2]
    >>> api.verify(certificate.folder).ok
    True
    """
    given = dict(settings, patch_sizes=patch_sizes, kind=kind)
    if band is not None:
        given["band"] = band
    return _certify(model, images, labels, given, out=out, item_ids=item_ids, seed=RUN_SEED)


def certify_l2(
    model: "PixelModel",
    images: "Tensor | str | Path",
    labels: "Tensor | None" = None,
    *,
    sigma: float | str,
    out: str | Path | None = None,
    item_ids: Sequence[str] | None = None,
    seed: int = RUN_SEED,
    denoiser: str | Path | None = None,
    **settings: Any,
) -> Certificate:
    """Certify items in an l2 ball by randomized smoothing with noise of `sigma`.

    `images` may also be the folder of a prepared dataset, which has labels. `denoiser`: a
    denoiser's folder, ours or of diffusers. `settings`: further fields of `GaussianSettings` in
    `components/certify/l2/settings.py`, e.g. `num_estimate` (100,000 draws per item by default),
    `radii`, `failure_prob`, `method` or `sampler`. Draws depend on `seed` and the item ids alone.

    >>> from pipelines import api
    >>> import torch
    >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
    >>> model = api.load_model(network, image_size=8)
    >>> images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    >>> certificate = api.certify_l2(model, images, torch.tensor([0, 1]), sigma=0.25,
    ...                              num_estimate=200, radii=[0.1, 0.25])
    >>> certificate.certified["at"].tolist()
    [0.1, 0.25]
    >>> api.verify(certificate.folder, resample=1, model=model, data=certificate.data).ok
    True
    """
    given = dict(settings, sigma=sigma, kind="gaussian")
    if denoiser is not None:
        given["denoiser"] = _denoiser_source(denoiser)
    return _certify(model, images, labels, given, out=out, item_ids=item_ids, seed=seed)


def _denoiser_source(denoiser: str | Path) -> str:
    from components.denoising.loading import is_source, source_of

    text = str(denoiser)
    return text if is_source(text) else source_of(Path(text).expanduser())


def _certify(
    model: "PixelModel",
    images: "Tensor | str | Path",
    labels: "Tensor | None",
    settings: dict[str, Any],
    *,
    out: str | Path | None,
    item_ids: Sequence[str] | None,
    seed: int,
) -> Certificate:
    from components.attacks.gradients import attack_mode
    from components.certify.vote_requests import VoteRequest
    from pipelines.runtime.temporary_folders import temporary_folder
    from pipelines.stages.certify.in_process import certify

    check_model(model)
    for key, remedy in NOT_HERE.items():
        if key in settings:
            raise CasemateError(key, settings[key], remedy)
    checked = _checked(settings)
    check_seed(seed)
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise CasemateError("out", out, "is a file; name a folder")
    data = _data_source(model, images, labels, item_ids)
    request = VoteRequest(
        settings=checked,
        key="certify",
        dataset=data,
        model=model,
        denoiser=settings.get("denoiser"),
        seed=seed,
        device=model.mean.device.type,
    )
    folder = temporary_folder("casemate-") if out is None else Path(out)
    try:
        with attack_mode(model):
            return Certificate(folder, certify(request, folder), data)
    except BaseException:
        if out is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _checked(settings: dict[str, Any]) -> "CertificateSettings":
    """The settings, read as a recipe reads them."""
    from pydantic import ValidationError

    from components.core.problems import RecipeError
    from pipelines.recipe.explain import explain, truth_values
    from pipelines.recipe.schema.base import Section
    from pipelines.recipe.schema.recipe import CertifySettings

    class Call(Section):
        certify: CertifySettings

    values = {"certify": {key: _as_list(value) for key, value in settings.items()}}
    try:
        problems = list(truth_values(Call, values))
        found: CertificateSettings = Call.model_validate(values).certify
    except ValidationError as error:
        problems = explain(Call, values, error)
    if problems:
        short = [p._replace(field=p.field.removeprefix("certify.")) for p in problems]
        raise RecipeError("certify", short) from None
    return found


def _as_list(value: Any) -> Any:
    """Ranges, arrays and tensors as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, range | tuple) else value


def _data_source(
    model: "PixelModel",
    images: "Tensor | str | Path",
    labels: "Tensor | None",
    item_ids: Sequence[str] | None,
) -> "DataSource":
    """The path of a prepared folder, or images and labels in memory."""
    from components.data.memory import MemoryDataset

    if isinstance(images, str | Path):
        for key, value in (("labels", labels), ("item_ids", item_ids)):
            if value is not None:
                raise CasemateError(key, "given", "does not apply to a prepared dataset")
        return Path(images).expanduser().absolute()
    if labels is None:
        raise CasemateError("labels", None, "is missing; images in memory need them")
    return MemoryDataset.of(images, labels, num_classes=model.spec.num_classes, item_ids=item_ids)


def verify(
    path: str | Path,
    *,
    resample: int = 0,
    model: "PixelModel | str | Path | None" = None,
    data: "DataSource | str | None" = None,
    denoiser: str | Path | None = None,
    key: str | Path | None = None,
    signature: str | Path | None = None,
) -> "VerifyReport":
    """Recompute every claim of a certificate from its votes, and compare files with the manifest.

    `resample`: number of random items whose votes the model repeats; they must be equal;
    model, data and denoiser are by default those of the step, or given as folders
    or loaded objects.
    `key`: a public ed25519 key (PEM or OpenSSH) that must have signed exactly these files, in
    the file `signature`, by default beside the certificate. Files that were not signed are not
    read any further.

    >>> from pipelines import api
    >>> api.verify("/nowhere")
    Traceback (most recent call last):
    components.core.errors.CasemateError: path: /nowhere is neither a folder with a certificate ...
    """
    from components.certify.verify import VerifyReport
    from components.certify.verify import verify as check
    from pipelines.runtime.manifests import changed_files, other_manifests

    if not isinstance(path, str | Path):
        raise CasemateError("path", repr(path), "is not the path of a certificate")
    if data is not None and not (isinstance(data, str | Path) or hasattr(data, "open_split")):
        remedy = "is not a dataset; give the folder of a prepared one, or Certificate.data"
        raise CasemateError("data", type(data).__name__, remedy)
    keyid, unsigned = _check_signature(path, key, signature)
    if unsigned:
        return VerifyReport(0, unsigned, sound=False)
    place = local_path(path)
    report = check(place)
    folder = place if place.is_dir() else place.parent
    problems = [
        *(f"{name}: is not the file that manifest.json lists" for name in changed_files(folder)),
        *(f"{name}: differs from manifest.json" for name in other_manifests(folder)),
    ]
    if resample:
        step = opened(path) if is_uri(str(path)) else folder
        problems += _resample(step, resample, model, data, denoiser)
    return VerifyReport(report.num_items, [*problems, *report.problems], report.sound, keyid)


def _check_signature(
    path: str | Path, key: str | Path | None, signature: str | Path | None
) -> tuple[str, list[str]]:
    """The id of a key that is asked for, and why its signature does not hold."""
    if key is None:
        if signature is not None:
            remedy = "needs the public key of its signer (--key)"
            raise CasemateError("signature", signature, remedy)
        return "", []
    from components.certify.keys import read_public_key
    from pipelines.runtime.signed_files import signature_problems

    public = read_public_key(Path(key).expanduser())
    given = None if signature is None else Path(signature).expanduser()
    return public.keyid, signature_problems(path, public, given)


def _resample(
    step: Folder,
    count: int,
    model: "PixelModel | str | Path | None",
    data: "DataSource | str | None",
    denoiser: str | Path | None,
) -> list[str]:
    from components.attacks.gradients import attack_mode
    from components.models.pixels import PixelModel
    from pipelines.stages.certify.resample import resample

    named = opened(model) if isinstance(model, str | Path) else model
    with attack_mode(named) if isinstance(named, PixelModel) else nullcontext():
        return resample(
            step,
            count=count,
            model=named,
            data=opened(data) if isinstance(data, str | Path) else data,
            denoiser=opened(denoiser) if denoiser is not None else None,
        )


def recertify(path: str | Path, out: str | Path | None = None, **claim: Any) -> Certificate:
    """Another certificate from the same votes: other sizes, radii, rule or failure probability.

    `out` is by default PATH-recertified. `claim`: `patch_sizes`, `rule`, `second_rule`,
    `delta_rule`, or `radii`, `failure_prob`; omitted settings keep their values.
    """
    from components.certify import verify as checks

    target = Path(out) if out else beside(path, "-recertified")
    return Certificate(target, checks.recertify(local_path(path), target, **claim))


class TsvFile(NamedTuple):
    """A written table and its number of items."""

    path: Path
    num_items: int


def export_tsv(path: str | Path, out: str | Path | None = None) -> TsvFile:
    """Write the radii of an l2 certificate as the per-image table of Cohen et al. 2019.

    `out` is by default PATH.tsv.
    """
    from components.certify.claim_rows import CERTIFICATES_NAME
    from components.certify.l2.cohen_tsv import rows_of_certificates, write_cohen_tsv
    from components.certify.verify import certificate_folder
    from components.core.tables import read_table

    folder = certificate_folder(local_path(path))
    rows = rows_of_certificates(read_table(folder / CERTIFICATES_NAME))
    target = Path(out) if out else beside(path, ".tsv")
    if not target.parent.is_dir():
        raise CasemateError("--out", target, "is in a folder that does not exist")
    if target.is_dir():
        raise CasemateError("--out", target, "is a folder; name the file to write in it")
    try:
        write_cohen_tsv(target, rows)
    except OSError as error:
        raise CasemateError("--out", target, f"cannot be written ({error.strerror})") from error
    return TsvFile(target, len(rows))
