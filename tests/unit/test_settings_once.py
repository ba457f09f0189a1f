"""A default is written once: in the settings class of its field."""

from pathlib import Path

from tests.benchmarks.plumbing_defaults import duplicated_defaults
from tests.benchmarks.plumbing_source import read_modules

CHECKOUT = Path(__file__).parents[2]


def test_no_default_is_written_twice():
    found = duplicated_defaults(read_modules(CHECKOUT))
    assert {(entry.place, entry.name): entry.others for entry in found} == {}
