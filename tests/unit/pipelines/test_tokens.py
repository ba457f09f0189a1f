"""A cluster that asks for a token: commands without it say so in one line. Real heads: cluster."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.e2e.cli import TINY, Cli, mistake_of, write_recipe
from tests.e2e.heads import ray_head

REMEDY = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as for its ray start"


class Guarded(BaseHTTPRequestHandler):
    """A dashboard that answers as Ray's does to a request without the right token."""

    def do_GET(self):
        given = "Authorization" in self.headers or "x-ray-authorization" in self.headers
        code, text = (403, "Forbidden: Invalid") if given else (401, "Unauthorized: Missing")
        self.send_response(code)
        self.end_headers()
        self.wfile.write(f"{text} authentication token".encode())

    def log_message(self, *words):
        pass


@pytest.fixture
def dashboard():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Guarded)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize(
    "words", [("status",), ("logs", "demo"), ("stop", "demo"), ("submit", "demo"), ("lint", "demo")]
)
def test_commands_with_another_token(dashboard, words):
    said = mistake_of(*words, "--address", dashboard)
    assert said.startswith(f"--address: {dashboard} asks for another token than the one here; ")
    assert said.endswith(REMEDY)


@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_a_head_refuses_work_without_its_token(tmp_path):
    recipe = write_recipe(tmp_path / "a.yaml", {"name": "joined", "data": TINY["data"]})
    (tmp_path / "home").mkdir()
    nowhere = {"RAY_AUTH_TOKEN": "", "RAY_AUTH_TOKEN_PATH": "", "HOME": str(tmp_path / "home")}
    with ray_head() as head:
        at = {"run": head.address, "submit": head.dashboard, "doctor": head.dashboard}
        for env in (nowhere, {"RAY_AUTH_TOKEN": "0" * 64}):
            for command, address in at.items():
                words = () if command == "doctor" else (recipe,)
                storage = tmp_path / "storage"
                done = Cli()(command, *words, "--address", address, "--storage", storage, env=env)
                line = done.err.splitlines()[-1]  # Ray itself warns before it
                assert done.code == 2, done.err
                assert line.startswith("casemate: ")
                assert address in line
                assert "RAY_AUTH_TOKEN" in line
                assert not list(storage.rglob("*manifest.json"))  # no step was begun
    assert list((tmp_path / "home").iterdir()) == []  # no token was made up
