"""A default is written once: in the settings class of its field."""

from pathlib import Path

from tests.benchmarks.plumbing_defaults import duplicated_defaults
from tests.benchmarks.plumbing_source import read_modules

CHECKOUT = Path(__file__).parents[2]


def test_no_default_is_written_twice():
    found = duplicated_defaults(read_modules(CHECKOUT))
    assert {(entry.place, entry.name): entry.others for entry in found} == {}


def settings_class(name: str, *fields: str, base: str = "Settings") -> str:
    return "\n    ".join([f"@settings\nclass {name}({base}):", *fields]) + "\n"


STEPS, SIZE = "num_steps: int = 10", "size: int = 6"
TWINS = {
    "components/room/settings.py": (
        settings_class("OneSettings", STEPS, "noise: float = 1.0", SIZE, 'rule: str = "exact"')
        + settings_class("DerivedSettings", SIZE, base="OneSettings")
    ),
    "components/room/maths.py": """
class Masks:
    size: int = 6

def count(rule: str = "exact", noise: float = default_of(OneSettings, "noise")): ...
""",
    "components/other/settings.py": (
        settings_class("TwinSettings", "noise: float = 1", SIZE, STEPS)
        + settings_class("LikeByChance", SIZE, STEPS)
        + "def far(size: int = 6): ..."
    ),
    "pipelines/api/runs.py": "def run(dtype: str = 'fp32', smoke: bool = False): ...",
    "pipelines/cli/main.py": "def run(dtype: str = 'fp32', smoke: bool = False): ...",
}


def test_twins_are_found(tmp_path):
    for name, text in TWINS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = duplicated_defaults(read_modules(tmp_path))
    one, twin = "components.room.settings.OneSettings", "components.other.settings.TwinSettings"
    assert {(entry.place, entry.name): set(entry.others) for entry in found} == {
        (twin, "noise"): {one},
        (twin, "num_steps"): {one},
        (twin, "size"): {one, "components.other.settings.far()"},
        ("components.other.settings.LikeByChance", "size"): {"components.other.settings.far()"},
        (one, "size"): {"components.room.maths.Masks"},
        (one, "rule"): {"components.room.maths.count()"},
        ("components.room.settings.DerivedSettings", "size"): {"components.room.maths.Masks"},
        ("pipelines.api.runs.run()", "dtype"): {"pipelines.cli.main.run()"},
    }
