"""A default is written once: in the settings class of its field."""

from pathlib import Path

from tests.benchmarks.plumbing_defaults import duplicated_defaults
from tests.benchmarks.plumbing_source import read_modules

CHECKOUT = Path(__file__).parents[2]

# Equal names and values of settings that are independent of each other.
COINCIDENCES = {
    # seed of a run; seed of the images that source `made` generates
    ("pipelines.recipe.schema.recipe.Recipe", "seed"),
    # steps of the attack that ranks tuning trials; steps of the challenge of patch certificates
    ("pipelines.recipe.schema.tune.TuneAttack", "num_steps"),
}


def test_no_default_is_written_twice():
    found = duplicated_defaults(read_modules(CHECKOUT))
    repeated = {(entry.place, entry.name): entry.others for entry in found}
    assert {key: repeated[key] for key in repeated.keys() - COINCIDENCES} == {}
    assert repeated.keys() >= COINCIDENCES, "an entry of COINCIDENCES is out of date"
