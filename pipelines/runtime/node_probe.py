"""Looks at one machine of a cluster, from a Ray actor on it.

Sent by value, so that it also runs on a machine without our code: it imports the standard library
alone, and everything else where it is needed.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 40.0  # for a machine, its first Python process included; and for MLflow

TORCH = (
    "import json, torch; n = torch.cuda.device_count(); "
    "print(json.dumps([torch.cuda.get_device_name(i) for i in range(n)]))"
)


DRIVER = "driver"  # whose key the machines look for


def storage_key(token: str, node: str = "") -> str:
    """Where a machine leaves the token in the storage, or the folder of all of them."""
    return f"probes/doctor-{token[:12]}/{node}".rstrip("/")


class NodeProbe:
    """What a machine has; all answers are plain values."""

    def now(self) -> float:
        """Its clock."""
        return time.time()

    def look(self, request: dict[str, Any]) -> dict[str, Any]:
        """Everything at once; see `doctor.py` for the request."""
        return {
            "versions": self.versions(request["packages"]),
            "code": self.code(),
            "gpus": self.gpus(request["seconds"]),
            "storage": self.storage(request["storage"], request["token"], request["node"]),
            "disk": self.disk(request["session"]),
            "shm": self.disk("/dev/shm"),
            "missing": [p for p in request["paths"] if "://" not in p and not Path(p).exists()],
            "stores": self.stores([path for path in request["paths"] if "://" in path]),
        }

    def stores(self, uris: list[str]) -> list[str]:
        """What is wrong with each URI as seen from here."""
        try:
            from components.core.errors import CasemateError
            from components.data.places import RemotePath
        except ImportError:
            return []  # `code` tells it
        found = []
        for uri in uris:
            try:
                RemotePath.parse(uri).check_reachable()
            except CasemateError as error:
                found.append(f"{error.value} {error.remedy}")
        return found

    def versions(self, packages: list[str]) -> dict[str, str | None]:
        """Versions of Python and of packages; None: not installed."""
        found: dict[str, str | None] = {"python": platform.python_version()}
        for name in packages:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = None
        return found

    def code(self) -> dict[str, str]:
        """The digest of our code as workers import it, or why it cannot be imported."""
        try:
            from pipelines.runtime.shipping import ROOT, code_digest

            return {"digest": code_digest(), "root": str(ROOT)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def gpus(self, seconds: float) -> dict[str, Any]:
        """Names of the GPUs that torch sees, in a process of its own: loading it may fail."""
        hidden = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
        env = {key: value for key, value in os.environ.items() if key not in hidden}
        command = [sys.executable, "-c", TORCH]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=env, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"torch does not list its GPUs within {seconds:.0f} s"}
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return {"error": f"import torch ends with code {done.returncode}: {why}"}
        return {"names": json.loads(done.stdout.strip().splitlines()[-1])}

    def storage(self, root: str, token: str, node: str) -> dict[str, Any]:
        """Read what the driver has written, try to create it again, and answer."""
        if not root:
            return {"same": False}
        try:
            from pipelines.runtime.store import open_store

            store, key = open_store(root), storage_key(token, DRIVER)
            if store.find(key) != token.encode():
                return {"same": False}
        except Exception as error:
            return {"same": False, "error": f"cannot be read ({error})"}
        try:
            refused = not store.put_new(key, b"other")
            store.put_new(storage_key(token, node), token.encode())
        except Exception as error:
            return {"same": True, "error": f"cannot be written ({error})"}
        return {"same": True, "refuses": refused}

    def disk(self, place: str) -> dict[str, int] | None:
        """Total and free bytes where a path is; None: there is no such path."""
        try:
            usage = shutil.disk_usage(place)
        except OSError:
            return None
        return {"total": usage.total, "free": usage.free}
