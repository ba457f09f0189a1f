"""Variables that `--env` forwards to the jobs of a flow.

Ray shows the `env_vars` of a runtime environment on its dashboard, in its logs and in the arguments
of starting workers. So the values travel in a file: a package of its own beside the code, which
the drivers and all workers of the jobs read when they start.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from components.core.errors import CasemateError
from pipelines.runtime.provenance import REVISION_ENV
from pipelines.runtime.shipping import code_folder

RECIPE_ENV = "CASEMATE_RECIPE"  # travels with the job: the cluster need not see the client's disk
FLAGS_ENV = "CASEMATE_FLAGS"
FORWARD_ENV = "CASEMATE_FORWARD"  # names of the variables that `--env` forwards
OWN_ENV = (RECIPE_ENV, FLAGS_ENV, FORWARD_ENV, REVISION_ENV, "RAY_AUTH_MODE")
PACKAGE = "casemate_forwarded"
VALUES = "values.json"
SETUP_HOOK = "pipelines.runtime.forwarding.load"  # Ray calls it in every new worker


def in_job() -> bool:
    """Whether this process is the driver of a submitted Ray job."""
    return bool(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"))


def values_of(names: Sequence[str], *, reserved: Mapping[str, str]) -> dict[str, str]:
    """The variables that a user forwards by name; their values are never printed."""
    from pipelines.recipe.credentials import (
        refuse_password_in_url,
    )  # jobs and workers need no recipe

    for name in names:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            shown = name.partition("=")[0]
            remedy = "is not the name of a variable; write the name alone, its value is read here"
            raise CasemateError("--env", shown, remedy)
        if name in OWN_ENV or name in reserved or name == "RAY_ADDRESS":
            raise CasemateError("--env", name, "is set by casemate for every job; leave it out")
        if name not in os.environ:
            raise CasemateError("--env", name, "is not set here; export it before submitting")
        refuse_password_in_url(name, os.environ[name])
    return {name: os.environ[name] for name in names}


def packed(values: Mapping[str, str]) -> Path:
    """A folder that carries the values.

    Ray names a package by the digest of its content; the salt keeps guessed values from being
    recognised by it.
    """
    salt = secrets.token_hex(16)
    folder = code_folder() / salt / PACKAGE
    folder.mkdir(parents=True)
    (folder / VALUES).write_text(json.dumps({"salt": salt, "values": dict(values)}))
    return folder


def load() -> None:
    """Set the forwarded variables in this process: a driver of a job, or a worker."""
    if not os.environ.get(FORWARD_ENV):
        return
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        remedy = "were forwarded, but their package is not here; submit the flow again"
        raise CasemateError("--env", os.environ[FORWARD_ENV], remedy)
    folder = Path(next(iter(found.submodule_search_locations)))
    folder.chmod(0o700)  # Ray unpacks it readable for every user of the machine
    os.environ.update(json.loads((folder / VALUES).read_text())["values"])
