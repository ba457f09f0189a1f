"""Small votes of both kinds, and folders with a finished certificate."""

import pytest

from tests.small_certificates import (
    COLUMNS_CLAIM,
    GAUSSIAN_CLAIM,
    columns_votes,
    gaussian_votes,
    write_small_certificate,
)


@pytest.fixture
def columns_evidence():
    return columns_votes()


@pytest.fixture
def gaussian_evidence():
    return gaussian_votes()


@pytest.fixture
def columns_folder(tmp_path, columns_evidence):
    return write_small_certificate(tmp_path / "patch", columns_evidence, COLUMNS_CLAIM)


@pytest.fixture
def gaussian_folder(tmp_path, gaussian_evidence):
    return write_small_certificate(tmp_path / "l2", gaussian_evidence, GAUSSIAN_CLAIM)


@pytest.fixture
def hold(monkeypatch):
    """Limits how many predictions are in memory at once: small files are treated as large ones."""

    def limit(predictions):
        for module in ("votes", "vote_order", "vote_rows"):
            monkeypatch.setattr(f"components.certify.{module}.HELD_PREDICTIONS", predictions)
        monkeypatch.setattr("components.certify.vote_order.HELD_BYTES", 4 * predictions)

    return limit
