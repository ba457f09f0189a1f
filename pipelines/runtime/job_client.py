"""A client of a cluster's dashboard that outlives lost connections."""

import logging
import time
from collections.abc import Callable
from typing import Any

import requests
from ray.dashboard.modules import dashboard_sdk
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from components.core.errors import CasemateError, first_line
from pipelines.runtime.cluster import check_reachable, refused_token

PATIENCE = 600.0  # seconds without an answer before a client gives up
REQUEST = 30.0  # seconds without a byte before a request counts as lost
LONGEST_PAUSE = 15.0  # seconds between two tries
UNAVAILABLE = (502, 503, 504)  # HTTP: a proxy in front of a dashboard that does not answer

Say = Callable[[str], None]


class ConnectionLostError(RuntimeError):
    """The dashboard has not answered for too long."""


class PatientClient(JobSubmissionClient):  # type: ignore[misc]  # Ray has no types
    """Repeats requests that were lost, with growing pauses, for at most `patience` seconds.

    Overrides the one method that all requests of Ray's client go through, which has neither a
    timeout nor retries. Submissions may be repeated: a job's id is accepted once.
    """

    def __init__(self, address: str | None, *, say: Say, patience: float = PATIENCE) -> None:
        self.say, self.patience = say, 0.0  # the first contact must succeed
        super().__init__(address)
        self.patience = patience

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        lost, pause = 0.0, 0.5
        while True:
            try:
                answer = super()._do_request(method, endpoint, **{"timeout": REQUEST, **options})
                if answer.status_code not in UNAVAILABLE or not self.patience:
                    if lost:
                        self.say("the dashboard answers again")
                    return answer
                problem = f"HTTP {answer.status_code}"
            except AuthenticationError as error:  # the cluster was started anew
                raise refused_token("--address", getattr(self, "_address", None)) from error
            except (requests.ConnectionError, requests.Timeout) as error:
                if not self.patience:
                    raise
                problem = type(error).__name__
            now = time.monotonic()
            if not lost:
                lost = now
                self.say(f"no answer from the dashboard ({problem}); trying again")
            if now - lost > self.patience:
                raise ConnectionLostError(
                    f"no answer from the dashboard for {self.patience:.0f} s ({problem}); "
                    "what runs on the cluster is not stopped by this"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def hostnames(self) -> set[str]:
        """Names of the cluster's machines; empty while they have not reported yet."""
        answer = self._do_request("GET", "/nodes?view=hostNameList")
        return set(answer.json()["data"]["hostNameList"]) if answer.ok else set()


def connect(address: str | None, *, say: Say = lambda _: None) -> PatientClient:
    """A client of the cluster's dashboard; inside a job, of the cluster the job runs on."""
    if address is not None:
        if not address.startswith(("http://", "https://")):
            raise CasemateError(
                "--address", address, "is not an http address; write e.g. http://127.0.0.1:8265"
            )
        check_reachable(address, key="--address")
    for name in ("ray", dashboard_sdk.__name__):  # they list every file that is packed
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return PatientClient(address, say=say)
    except AuthenticationError as error:
        raise refused_token("--address", address) from error
    except (ConnectionError, RuntimeError, requests.RequestException) as error:
        remedy = f"does not accept jobs: {first_line(error)}"
        raise CasemateError("--address", address, remedy) from error
