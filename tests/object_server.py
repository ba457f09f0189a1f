"""An S3 server of its own process (moto), for tests that read or write objects."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
import pytest

from tests.object_store import S3Server, free_port, moto_command, serving

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
    port = free_port()
    server = ObjectServer(f"http://127.0.0.1:{port}")
    with (
        serving(moto_command(port), port),
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in server.env.items():
            patch.setenv(name, value)
        S3Server(server.url).make_bucket(BUCKET)
        yield server
