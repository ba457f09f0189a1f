"""ModelSpec: plain values out, the same spec back."""

import json

import pytest

from components.core.errors import CasemateError
from components.models.spec import ModelSpec


def test_spec_survives_json(new_spec):
    spec = new_spec(
        upsample=32,
        token_policy="drop",
        trained_for={"kind": "columns", "band": 5, "radii": [1, 2]},
    )
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_defaults_may_be_left_out(new_spec):
    values = new_spec().to_dict()
    for key in ("upsample", "token_policy", "trained_for"):
        del values[key]
    assert ModelSpec.from_dict(values) == new_spec()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_sise": 4}, r"some/model\.json: patch_sise is not a ModelSpec key"),
        ({"token_policy": "keep"}, r"some/model\.json: spec cannot be read: token_policy"),
        ({"mean": [0.5]}, r"mean and std need 3 entries"),
    ],
)
def test_wrong_values_are_named(new_spec, change, message):
    with pytest.raises(CasemateError, match=message):
        ModelSpec.from_dict({**new_spec().to_dict(), **change}, source="some/model.json")


def test_missing_keys_are_named(new_spec):
    values = new_spec().to_dict()
    del values["architecture"]
    with pytest.raises(CasemateError, match="architecture"):
        ModelSpec.from_dict(values)
