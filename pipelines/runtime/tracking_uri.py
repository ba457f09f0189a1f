"""Where runs are tracked: `tracking.uri`, else MLFLOW_TRACKING_URI, else SQLite in the storage.

Light to import: a finished flow is shown without MLflow.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit
from uuid import uuid4

from components.core.errors import CasemateError
from pipelines.recipe.credentials import SERVER_ENV, TRACKING, credentials_of, keep_apart
from pipelines.recipe.schema.place import TrackingSection
from pipelines.runtime.outbox import UnavailableError
from pipelines.runtime.storage import Storage

URI_ENV = "MLFLOW_TRACKING_URI"
ARTIFACTS, STORAGE_ID = "mlartifacts", "storage-id"  # keys in a storage
SQLITE, FILES = "sqlite:///", "file"  # schemes
# MLflow opens in its view of language-model applications unless the address names the other one.
TRAINING_VIEW, LOCAL_UI = "/#/experiments?workflowType=machine_learning", "http://127.0.0.1:5000"
OPEN = ".open"  # file beside an outbox: the run of its flow is not complete
RECIPE_TAG, FOLDER_TAG = "casemate.recipe", "casemate.folder"  # of flows, and of steps
STORAGE_TAG = "casemate.storage"  # of steps whose artifacts a server keeps elsewhere
PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
DRIVERS = {  # dialect and driver as SQLAlchemy names them: module, what to install
    "postgresql": ("psycopg", "pip install 'casemate[postgres]'"),
    "postgresql+psycopg": ("psycopg", "pip install 'casemate[postgres]'"),
    "postgresql+psycopg2": ("psycopg2", "pip install psycopg2-binary, or write postgresql://"),
    "mysql+pymysql": ("pymysql", "pip install pymysql"),
}


def default_uri(storage: Storage) -> str | None:
    """SQLite in a storage that is a folder; absolute: the working directory never matters."""
    return f"sqlite:///{storage.root}/mlflow.db" if storage.is_local else None


def tracking_uri(section: TrackingSection, storage: Storage) -> str:
    """The URI of the tracking store, without a password."""
    if section.uri:
        return section.uri
    if given := os.environ.get(URI_ENV):
        return keep_apart(given, key=URI_ENV)
    if uri := default_uri(storage):
        return uri
    remedy = f"cannot hold MLflow's database; set {TRACKING} or {URI_ENV}, e.g. to an MLflow server"
    raise CasemateError("storage.root", storage.root, remedy)


def artifact_location(uri: str, storage: Storage) -> str | None:
    """Where artifacts of a new experiment go; None: where the server keeps them."""
    if is_server(uri):
        return None
    if storage.is_local:
        return (storage.path / ARTIFACTS).as_uri()
    if uri.startswith(SQLITE):  # written by this machine alone
        return (Path(uri.removeprefix(SQLITE)).absolute().parent / ARTIFACTS).as_uri()
    return f"{storage.root}/{ARTIFACTS}"


def is_server(uri: str) -> bool:
    """Whether an MLflow server answers there; other stores are databases."""
    return uri.startswith(("http://", "https://"))


def how_to_open(uri: str) -> str:
    """What a user opens in a browser, or the command that shows the store and its page."""
    if is_server(uri):
        return f"{uri.rstrip('/')}{TRAINING_VIEW}"
    return f"mlflow ui --backend-store-uri '{uri}' (opens at {LOCAL_UI}{TRAINING_VIEW})"


def check_driver(uri: str) -> None:
    """Refuse a database whose Python driver is not installed."""
    module, remedy = DRIVERS.get(urlsplit(uri).scheme, (None, ""))
    if module and find_spec(module) is None:
        raise CasemateError(TRACKING, uri, f"needs the Python package {module}: {remedy}")


def check_artifact_client(location: str | None) -> None:
    """Refuse a bucket for artifacts when the client that MLflow opens it with is not installed."""
    if location and location.startswith("s3://") and find_spec("boto3") is None:
        remedy = "needs boto3: pip install 'casemate[s3]', or name an MLflow server"
        raise CasemateError(TRACKING, location, remedy)


def check_port(uri: str) -> None:
    """One quick TCP try of a database on the network; raises `UnavailableError`."""
    parts = urlsplit(uri)
    port = parts.port or PORTS.get(parts.scheme.partition("+")[0])
    if is_server(uri) or not parts.hostname or not port:
        return
    try:
        with socket.create_connection((parts.hostname, port), timeout=5):
            pass
    except OSError as error:
        raise UnavailableError(error.strerror or str(error)) from error


def flow_outbox(folder: Path, fingerprint: str, first_step: str) -> Path:
    """Where messages of a flow's own run wait for the server; `folder` is the recipe's.

    Processes that run stages of one flow side by side have different first steps.
    """
    return folder / ".outbox" / f"{fingerprint[:12]}-{first_step}.jsonl"


def flow_outboxes(folder: Path, fingerprint: str) -> list[Path]:
    """Where messages of a flow's own run wait, or may never have been put: the flow was killed."""
    found = (folder / ".outbox").glob(f"{fingerprint[:12]}-*")
    return sorted({path.with_suffix(".jsonl") for path in found})


def begin_flow(outbox: Path) -> None:
    """Note that the flow's own run is not complete."""
    outbox.parent.mkdir(parents=True, exist_ok=True)
    outbox.with_suffix(OPEN).touch()


def end_flow(folder: Path, fingerprint: str) -> None:
    """Forget that the flow's own run was not complete."""
    for outbox in flow_outboxes(folder, fingerprint):
        outbox.with_suffix(OPEN).unlink(missing_ok=True)


def storage_id(storage: Storage) -> str:
    """The name of a storage in a tracking store that others use, too; moves with the folder."""
    earlier = storage.path / f".{STORAGE_ID}"  # version 0.1
    token = earlier.read_bytes() if earlier.is_file() else uuid4().hex.encode()
    storage.store.put_new(STORAGE_ID, token)  # or there is one
    return storage.store.get(STORAGE_ID).decode()


@contextmanager
def credentials_in_environment(uri: str) -> Iterator[str]:
    """The URI to connect to while its user and password are in the environment.

    They are taken away afterwards: the next flow of this process may track elsewhere.
    """
    found = credentials_of(uri)
    if found is None:
        yield uri
        return
    password = found.password or ""
    if is_server(uri):
        added = dict(zip(SERVER_ENV, (found.user, password), strict=True))
    elif urlsplit(uri).scheme.startswith("postgresql"):
        added = {"PGPASSWORD": password}
    else:  # no variable for it: in memory only
        added, user = {}, quote(found.user, safe="")
        uri = uri.replace(f"://{user}@", f"://{user}:{quote(password, safe='')}@", 1)
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield uri
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def place_now(artifact_uri: str, tracking_uri: str) -> str:
    """Where artifacts are now: beside the database, if it is a copy of the one they are named by.

    A copy has the folder `mlartifacts` beside its database. The place in the URI is then that of
    the original: it is gone, or has a database of its own. Other places are left alone.
    """
    before, found, below = artifact_uri.partition(f"/{ARTIFACTS}/")
    if not found or not before.startswith(f"{FILES}:") or not tracking_uri.startswith(SQLITE):
        return artifact_uri
    original = Path(unquote(urlsplit(before).path))
    here = Path(tracking_uri.removeprefix(SQLITE).partition("?")[0]).absolute().parent
    there = original / ARTIFACTS
    if not (here / ARTIFACTS).is_dir() or _same(here, original):
        return artifact_uri
    if there.is_dir() and not (original / "mlflow.db").is_file():
        return artifact_uri  # the database was made elsewhere on purpose
    return f"{(here / ARTIFACTS).as_uri()}/{below}"


def _same(one: Path, other: Path) -> bool:
    """Whether both are one folder, perhaps by two names."""
    return one == other or (other.is_dir() and one.samefile(other))
