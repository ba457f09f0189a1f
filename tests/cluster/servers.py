"""Real servers for the cluster tests: Postgres of the system's packages, MLflow on it, a proxy."""

import base64
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PASSWORD = "pg-" + secrets.token_hex(8)
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
UP_SECONDS = 240  # a busy machine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def postgres_binaries() -> Path | None:
    """The newest Postgres of the system's packages, where initdb and pg_ctl are."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


def wait_until(ready, *, seconds: float = UP_SECONDS, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"{what}: waited {seconds:.0f} s"
        time.sleep(0.1)


class Postgres:
    """A Postgres of its own folder and port with one user and his database `mlflow`."""

    def __init__(self, folder: Path, *, user: str = "casemate", password: str = PASSWORD) -> None:
        binaries = postgres_binaries()
        assert binaries is not None
        self.binaries, self.folder, self.port = binaries, folder, free_port()
        self.user, self.password = user, password
        self.uri = f"postgresql://{user}@127.0.0.1:{self.port}/mlflow"

    def start(self) -> None:
        self.folder.mkdir(parents=True)
        password = self.folder / "password"
        password.write_text(self.password)
        if os.getuid() == 0:  # Postgres refuses to run as root
            account = pwd.getpwnam("postgres")
            for path in (self.folder, password):
                os.chown(path, account.pw_uid, account.pw_gid)
        where = self.folder / "data"
        self._call(
            "initdb", "-D", where, "-U", self.user, f"--pwfile={password}", "-A", "scram-sha-256",
            "--no-sync",
        )  # fmt: skip
        options = f"-p {self.port} -k {self.folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        self._call("pg_ctl", "-D", where, "-o", options, "-l", self.folder / "log", "-w", "start")
        self._call("createdb", "-h", "127.0.0.1", "-p", self.port, "-U", self.user, "mlflow")

    def stop(self) -> None:
        self._call("pg_ctl", "-D", self.folder / "data", "-m", "immediate", "stop")

    def _call(self, name: str, *arguments: object) -> None:
        command = [str(self.binaries / name), *map(str, arguments)]
        if os.getuid() == 0:
            command = ["runuser", "-u", "postgres", "--", *command]
        env = {**os.environ, "PGPASSWORD": self.password}
        subprocess.run(command, check=True, env=env, cwd="/", stdout=subprocess.DEVNULL)


class MlflowServer:
    """`mlflow server` with served artifacts; can be stopped and started again on its port."""

    def __init__(self, folder: Path, *, store: str) -> None:
        self.folder, self.store, self.port = folder, store, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        env = {**os.environ, "PGPASSWORD": PASSWORD, **QUIET}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    str(Path(sys.executable).with_name("mlflow")), "server", "--host", "127.0.0.1",
                    "--port", str(self.port), "--backend-store-uri", self.store,
                    "--artifacts-destination", str(self.folder / "artifacts"), "--workers", "1",
                ],
                env=env, cwd=self.folder, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_until(self._answers, what=f"mlflow server, see {self.folder / 'log'}")

    def stop(self) -> None:
        """End the server at once, as a lost machine would."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


class Proxy:
    """In front of a server: asks for a password (401 without it), or loses requests and answers."""

    def __init__(self, server: str, *, login: str | None = None, lose_every: int = 0) -> None:
        wanted = "Basic " + base64.b64encode(login.encode()).decode() if login else None
        self.num_refused, self.num_lost = 0, 0
        self.num_requests: Counter[str] = Counter()
        proxy, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _forward(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length) if length else None
                with lock:  # a model is 200 uploads: tries that each lose one would never end
                    kind = "uploads" if "mlflow-artifacts" in self.path else "calls"
                    proxy.num_requests[kind] += 1
                    every = lose_every * (8 if kind == "uploads" else 1)
                    lose = every and proxy.num_requests[kind] % every == 0
                    proxy.num_lost += bool(lose)
                    lose_request = lose and proxy.num_lost % 2 == 0  # else its answer
                if lose_request:
                    self.close_connection = True
                    return
                if wanted and self.headers.get("Authorization") != wanted:
                    proxy.num_refused += 1
                    self._reply(401, b"who are you?", "text/plain")
                    return
                passed = {
                    name: value for name, value in self.headers.items()
                    if name.lower() not in ("host", "authorization", "connection")
                }  # fmt: skip
                request = urllib.request.Request(
                    server + self.path, data=body, headers=passed, method=self.command
                )
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        found = answer.status, answer.read(), answer.headers
                except urllib.error.HTTPError as error:
                    found = error.code, error.read(), error.headers
                if lose:
                    self.close_connection = True
                    return
                status, content, headers = found
                self._reply(status, content, headers.get("Content-Type", "application/json"))

            def _reply(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _forward  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Silent."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
