"""Small votes of both kinds, and certificates of them, written by the real writers."""

import numpy as np
import torch

from components.certify.certificate import write_certificate
from components.certify.vote_rows import VoteRow, image_digest
from components.certify.votes import write_votes
from components.core.noise_streams import NOISE_IMPL

NUM_ITEMS = 6
WIDTH = 8


def _header(kind, settings):
    return {
        "kind": kind,
        "run_id": "run-1",
        "model_digest": "a" * 64,
        "dataset_digest": "b" * 64,
        "num_classes": 3,
        "image": {"channels": 1, "height": WIDTH, "width": WIDTH},
        "settings": settings,
        "noise_impl": NOISE_IMPL if kind == "gaussian" else None,
        "num_items": NUM_ITEMS,
        "software": {"numpy": np.__version__},
    }


def _rows(streams):
    """`streams`: name -> (size, block). Item i votes i % 3 except in its first i tenths."""
    rows = []
    for i in range(NUM_ITEMS):
        digest = image_digest(torch.full((1, WIDTH, WIDTH), i, dtype=torch.uint8))
        label = i % 3 if i not in (1, 4) else 0  # items 1 and 4 are classified wrongly
        for stream, (size, block) in streams.items():
            votes = np.full(size, i % 3, dtype=np.uint16)
            votes[: i * size // 10] = (i + 1) % 3
            rows += [
                VoteRow(f"item-{i}", label, digest, stream, low, stop, votes[low:stop])
                for low in range(0, size, block)
                for stop in [min(low + block, size)]
            ]
    return rows


def columns_votes():
    """(header, rows) of 8 bands on each of 6 items."""
    return _header("columns", {"band": 1, "stride": 1}), _rows({"columns": (8, 8)})


def gaussian_votes():
    """(header, rows) of 10 + 100 draws on each of 6 items, in blocks of 40."""
    settings = {"sigma": 0.5, "num_select": 10, "num_estimate": 100, "run_seed": 0}
    return _header("gaussian", settings), _rows({"select": (10, 40), "estimate": (100, 40)})


COLUMNS_CLAIM = {"patch_sizes": [1, 2], "rule": "count"}
GAUSSIAN_CLAIM = {"failure_prob": 0.001, "radii": [0.25, 0.5]}


def write_small_certificate(folder, evidence, settings):
    """A finished certificate in a new folder; returns it."""
    header, rows = evidence
    folder.mkdir()
    write_certificate(folder, write_votes(folder / "votes.parquet", rows, header), settings)
    return folder
