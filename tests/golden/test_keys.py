"""Keys of every file that a small flow leaves, as they were recorded.

To renew them after an intended change: `CASEMATE_RENEW_GOLDEN=1 pytest tests/golden/test_keys.py`.
"""

import os

import pytest

from tests.golden.documents import read_json, write_json
from tests.golden.layout import TINY_KEYS, keys_record


@pytest.mark.e2e
def test_files_of_a_flow_keep_their_keys(finished_flow):
    if os.environ.get("CASEMATE_RENEW_GOLDEN"):
        write_json(TINY_KEYS, keys_record(finished_flow))
    assert keys_record(finished_flow) == read_json(TINY_KEYS)
