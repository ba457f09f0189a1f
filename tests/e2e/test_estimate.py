"""`casemate estimate --measure`: work of a recipe, and a small flow, timed on this machine."""

import pytest

from tests.e2e.cli import TINY, write_recipe

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

FEW = {"eps": 0.05, "num_items": 8, "sanity": None, "attacks": [{"kind": "fgsm"}]}
SHORT = {
    **{key: TINY[key] for key in ("name", "data", "model")},
    "train": {"epochs": 1, "batch_size": 16, "val_items": 8},
    "attack": {"linf": FEW},
}


def test_a_measured_estimate_has_speeds_and_starts_of_this_machine(cli, tmp_path):
    recipe = write_recipe(tmp_path / "short.yaml", SHORT)
    elsewhere = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "RAY_ADDRESS": "127.0.0.1:9"}
    said = cli("estimate", recipe, "--measure", "--price", 2, "--json", env=elsewhere)
    assert said.code == 0, said.err
    rows = {row["step"]: row for row in said.json}
    assert set(rows) == {"prepare", "train.main", "attack.linf", "report"}
    for row in rows.values():
        (place,) = row["hours"]
        assert place["where"] == "here"
        assert place["rate"] == "measured here"
        # A step starts processes or writes pages: that takes longer than its few passes.
        passes = sum(p["least_passes"] * p.get("cpu_seconds", 0) for p in row["parts"]) / 3600
        assert passes < place["cpu_low"] <= place["cpu_high"]
        assert place["cost_high"] == pytest.approx(2 * place["device_hours_high"])
    assert list(tmp_path.iterdir()) == [recipe]  # the small flow has left nothing here
