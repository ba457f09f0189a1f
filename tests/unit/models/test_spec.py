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
        ({"upsample": 32, "upsample_mode": "cubic"}, r"upsample_mode must be one of"),
        ({"upsample_mode": "bilinear"}, r"model\.upsample_mode: bilinear does nothing without"),
        ({"upsample": 8}, r"model\.upsample: 8 is below the image side 16.*bilinear"),
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


def test_the_default_mode_leaves_no_trace(new_spec):
    """Digests of models that were saved before the key existed must not change."""
    spec = new_spec(upsample=32)
    assert "upsample_mode" not in spec.to_dict()
    assert ModelSpec.from_dict({**spec.to_dict(), "upsample_mode": "nearest"}) == spec
    smooth = new_spec(upsample=32, upsample_mode="bilinear")
    assert ModelSpec.from_dict(smooth.to_dict()) == smooth != spec


def test_data_of_another_kind_are_refused(new_spec):
    spec = new_spec()
    spec.check_image((3, 16, 16))
    spec.check_classes(5)
    with pytest.raises(
        CasemateError, match=r"^image: 1x16x16 .* is not the 3x16x16 that this tiny"
    ):
        spec.check_image((1, 16, 16))
    with pytest.raises(CasemateError, match=r"^classes: 10 in the data, but this tiny_vit has 5"):
        spec.check_classes(10)
