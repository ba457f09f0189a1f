"""Tags of every run: who started it, with which code, from which recipe."""

import getpass

from pipelines.runtime.forwarding import in_job
from pipelines.runtime.provenance import git_revision
from pipelines.runtime.tracking_uri import RECIPE_TAG

DATASET_TAG = "casemate.dataset_digest"
REVISION_TAG = "casemate.git_revision"  # with `-dirty` where files differ from the commit


def origin_tags(recipe: str, source: str) -> dict[str, str]:
    """The tags that MLflow's pages show as user, source and version; `source` is a recipe file."""
    tags = {
        RECIPE_TAG: recipe,
        "mlflow.source.name": source,
        "mlflow.source.type": "JOB" if in_job() else "LOCAL",
    }
    if user := _user():
        tags["mlflow.user"] = user
    if revision := git_revision():
        tags[REVISION_TAG] = revision
        tags["mlflow.source.git.commit"] = revision.removesuffix("-dirty")
    return tags


def _user() -> str | None:
    """The name of the user; None in a container whose user has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None
