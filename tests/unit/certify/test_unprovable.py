"""Patch sizes that no votes can prove, against certificates of unanimous votes."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from components.certify.header import VotesHeader
from components.certify.patch.settings import AblationSettings
from components.certify.registry import family_of
from tests.small_certificates import COLUMNS_CLAIM, columns_votes, write_small_certificate


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("band", [1, 2, 4])
def test_sizes_are_named_that_unanimous_votes_do_not_prove(tmp_path, band, stride):
    header, rows = columns_votes()
    side = header["image"]["width"]
    header["settings"] |= {"band": band, "stride": stride}
    count = len(range(0, side, stride))
    rows = [  # every ablation votes for the label
        replace(row, predictions=np.full(count, row.label, np.uint16), stop=count) for row in rows
    ]
    sizes = list(range(1, side + 1))
    made = write_small_certificate(
        tmp_path / "made", (header, rows), COLUMNS_CLAIM | {"patch_sizes": sizes}
    )
    entries = json.loads((made / "certificate.json").read_text())["summary"]["certified"]
    lost = {e["patch_size"] for e in entries if e["accuracy"]["value"] == 0}
    settings = AblationSettings(kind="columns", band=band, stride=stride, patch_sizes=sizes)
    read = VotesHeader.from_dict(header)
    told = family_of("columns").unprovable(settings, read) or ""
    assert {int(size) for size in re.findall(r"(\d+) \(\d+\)", told)} == lost
