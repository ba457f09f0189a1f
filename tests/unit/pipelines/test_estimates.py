"""Prices of certificates: counted once more from the model's own masks, and refused when open."""

import pytest

from components.certify.estimate import vit_flops
from components.certify.patch.double_masking import MaskSet
from components.core.errors import CasemateError
from components.data.ablation import Ablations
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from pipelines.recipe.costs import Hardware, Question, rows_of
from pipelines.recipe.load import parse
from pipelines.stages.certify.cost import costs_of

OPTIONS = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
PLACE = {"accelerators": ["A100"], "dtype": "fp32", "num_workers": 2}


def priced(section, *, model=None, **place):
    recipe = parse(
        {"name": "x", "data": {"source": "digits", "image_size": 8, "limits": {"test": 7}},
         "model": {"architecture": "tiny_vit", "options": OPTIONS, "token_policy": "drop",
                   **(model or {})},
         "train": {}, "certify": {"p": {"patch_sizes": [1], **section}}},
        source="x",
    )  # fmt: skip
    (row,) = rows_of(costs_of(recipe, Question()), Hardware(**{**PLACE, **place}))
    return row


@pytest.mark.parametrize("upsample", [None, 16])
@pytest.mark.parametrize("kind", ["columns", "rows", "blocks", "both", "double_masking"])
def test_flops_are_those_of_the_tokens_that_the_model_keeps(kind, upsample):
    if kind == "double_masking":
        section = {"mask_patch": 2, "num_masks": 2}
        masks = MaskSet(image_size=(8, 8), patch=2, num_masks=2)
        shown = masks.visible(masks.pairs())
    else:
        section = {"band": 3, "stride": 3}
        shown = Ablations(kind=kind, image_size=(8, 8), **section).masks()
    spec = ModelSpec("tiny_vit", 10, 1, 8, (0.5,), (0.5,), options=OPTIONS, upsample=upsample,
                     token_policy="drop")  # fmt: skip
    net = PixelModel(spec)
    lengths = net.num_kept(shown).tolist()
    expected = sum(
        vit_flops(n + 1, width=32, depth=2) + 2 * n * 16 * 32 + 2 * 32 * 10 for n in lengths
    )
    row = priced({"kind": kind, **section}, model={"upsample": upsample})
    assert row["passes"] == 7 * len(shown)
    assert row["flops"] == pytest.approx(7 * expected)
    (hours,) = row["hours"]
    assert hours["low"] == hours["high"] > 0


def test_kept_black_every_pass_costs_a_whole_image():
    row = priced({"kind": "columns", "band": 3, "token_policy": "mask"})
    noisy = {"kind": "gaussian", "sigma": 0.25, "num_select": 1, "num_estimate": 7,
             "block_size": 1, "micro_batch": 1, "failure_prob": 0.1, "radii": [0.1]}  # fmt: skip
    recipe = parse({"name": "x", "data": {"source": "digits", "image_size": 8},
                    "model": {"architecture": "tiny_vit", "options": OPTIONS}, "train": {},
                    "certify": {"l": {**noisy, "num_items": 7}}}, source="x")  # fmt: skip
    (draws,) = rows_of(costs_of(recipe, Question()), Hardware(**PLACE))
    assert row["passes"] == draws["passes"] == 56  # 8 bands, and 1 + 7 draws
    assert row["flops"] == draws["flops"]


def test_early_stops_may_halve_the_hours_and_a_measured_speed_decides_them():
    row = priced({"kind": "rows", "band": 3, "stop_early": True}, passes_per_second=10.0)
    (hours,) = row["hours"]
    assert hours["high"] == pytest.approx(56 / 10 / 2 / 0.95 / 3600)
    assert hours["low"] == pytest.approx(hours["high"] / 2)


@pytest.mark.parametrize(
    ("section", "place", "said"),
    [
        ({"kind": "blocks"}, {}, r"certify\.p\.band: .* not trained on blocks"),
        ({"kind": "columns", "band": 9}, {}, r"certify\.band: 9 is larger than the image"),
        ({"kind": "rows", "band": 2}, {"accelerators": ["A1000"]}, "accelerator: A1000"),
        ({"kind": "rows", "band": 2}, {"accelerators": [], "dtype": "int8"}, "dtype: int8"),
        ({"kind": "rows", "band": 2}, {"passes_per_second": 0.0}, "passes-per-second"),
    ],
)
def test_what_cannot_be_priced_is_refused(section, place, said):
    with pytest.raises(CasemateError, match=said):
        priced(section, **place)
