"""What comes before votes, on a cluster or in this process: checks, and the header of the file."""

from typing import Any

from components.certify.family import AnyFamily
from components.certify.header import VotesHeader
from components.certify.settings import CertificateSettings
from components.certify.tasks import Dataset, VoteTask
from components.core.errors import CasemateError
from pipelines.runtime.artifacts import software

PACKAGES = ("casemate", "torch", "timm", "numpy", "scipy")  # whose versions votes record


def check_sizes(settings: CertificateSettings, dataset: Dataset, *, key: str) -> None:
    """Refuse lengths that do not fit into the images; a band as trained fitted in training."""
    side = min(dataset.height, dataset.width)
    for name, value in settings.lengths():
        if value > side:
            raise CasemateError(f"{key}.{name}", value, f"is larger than the image ({side})")


def votes_header(
    family: AnyFamily,
    task: VoteTask[Any],
    dataset: Dataset,
    *,
    num_items: int | None,
    run_id: str,
) -> VotesHeader:
    """The header of the votes on the first `num_items` test items (None: all)."""
    available = dataset.splits["test"]
    return family.header(
        task,
        dataset,
        num_items=min(num_items or available, available),
        run_id=run_id,
        software={name: v for name, v in software().items() if name in PACKAGES},
    )
