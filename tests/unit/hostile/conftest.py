"""No payload of an attacker runs."""

import pytest

from tests.unit.hostile.attacks import MARK


@pytest.fixture(autouse=True)
def _no_payload_runs(tmp_path, monkeypatch):
    """Payloads write a file to the working folder."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / MARK).exists()
