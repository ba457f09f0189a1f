"""An S3 server of its own process (moto), for tests that read or write objects."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import obstore
import pytest

BUCKET = "raw"


@dataclass(frozen=True)
class ObjectServer:
    """A running server with the bucket `raw`."""

    url: str

    @property
    def env(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1",  # no role of the machine
        }

    def store(self) -> Any:
        return obstore.store.from_url(f"s3://{BUCKET}", client_options={"allow_http": True})

    def put(self, key: str, content: bytes) -> str:
        self.store().put(key, content)
        return f"s3://{BUCKET}/{key}"

    def upload(self, path: Path, prefix: str) -> str:
        """A file, or all files of a folder, below a prefix; returns its URI."""
        if path.is_file():
            return self.put(f"{prefix}/{path.name}", path.read_bytes())
        for file in path.rglob("*"):
            if file.is_file():
                self.put(f"{prefix}/{file.relative_to(path).as_posix()}", file.read_bytes())
        return f"s3://{BUCKET}/{prefix}"


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Start the server, with its variables in the environment, and end it afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet: Mapping[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet)
    server = ObjectServer(f"http://127.0.0.1:{port}")
    try:
        _wait_for(server.url, process)
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("AWS_")]:
                patch.delenv(name)
            for name, value in server.env.items():
                patch.setenv(name, value)
            import boto3

            boto3.client("s3").create_bucket(Bucket=BUCKET)
            yield server
    finally:
        process.terminate()
        process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "the S3 server ended"
        try:
            urlopen(url, timeout=5).close()
        except (URLError, OSError):
            time.sleep(0.1)
        else:
            return
    raise AssertionError("the S3 server does not answer")
