"""Starting weights: a folder of ours or timm's hub, adapted and accounted for."""

import time
from dataclasses import replace

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from components.core.errors import CasemateError
from components.models import pretrained
from components.models.adapt import resample_kernel, resample_positions
from components.models.checkpoint import save_model
from components.models.importing.match import DoesNotFit
from components.models.pixels import PixelModel
from components.models.pretrained import load_pretrained
from components.models.spec import ModelSpec


@pytest.fixture
def folder(tmp_path, new_model):
    save_model(tmp_path / "parent", new_model(), recipe_digest="")
    return tmp_path / "parent"


def test_a_folder_of_the_same_spec_gives_the_same_model(folder, new_spec, new_model, images):
    model = PixelModel(new_spec()).eval()
    report = load_pretrained(model, str(folder))
    assert torch.equal(model(images), new_model()(images))
    assert set(report.loaded) == set(model.net.state_dict())


def test_other_classes_get_a_fresh_head_and_keep_the_rest(folder, new_spec, new_model):
    model = PixelModel(new_spec(num_classes=9))
    head = model.net.head.weight.clone()
    report = load_pretrained(model, str(folder))
    assert report.fresh == ("head.weight", "head.bias")
    assert torch.equal(model.net.head.weight, head)
    parent = new_model().net.state_dict()
    for name in report.loaded:
        assert torch.equal(model.net.state_dict()[name], parent[name])
    assert len(report.loaded) == len(parent) - 2


def test_a_head_is_only_left_out_for_other_classes(monkeypatch, folder, new_spec, new_model):
    parent = new_model()
    parent.net.head = torch.nn.Sequential(parent.net.head)  # the same classes by another name
    monkeypatch.setattr(pretrained, "load_model", lambda _: parent)
    with pytest.raises(DoesNotFit, match=r"lack head\.weight"):
        load_pretrained(PixelModel(new_spec()), str(folder))


def changed(spec: ModelSpec, **options: object) -> ModelSpec:
    return replace(spec, options={**spec.options, **options})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: changed(s, num_heads=4),
            r"model\.options\.num_heads: 4 changes what .*'num_hea",
        ),
        (lambda s: changed(s, depth=1), r"model\.options\.depth: 1 changes"),
        (
            lambda s: replace(s, options={k: v for k, v in s.options.items() if k != "num_heads"}),
            r"model\.options\.num_heads: \(default\) changes",
        ),
        (
            lambda s: replace(s, mean=(0.5,) * 3),
            r"model\.mean: \(0\.5, 0\.5, 0\.5\) contradicts .* mean \(0\.4, 0\.5, 0\.6\)",
        ),
        (lambda s: replace(s, std=(1.0,) * 3), r"model\.std: .* contradicts"),
        (lambda s: replace(s, architecture="tiny_xcit"), r"model\.architecture: tiny_xcit is not"),
    ],
)
def test_another_function_of_the_same_tensors_is_refused(folder, new_spec, change, message):
    """All but the last would load: heads, depth and normalisation leave no trace in shapes."""
    model = PixelModel(change(new_spec()))
    before = {name: value.clone() for name, value in model.net.state_dict().items()}
    with pytest.raises(CasemateError, match=message) as caught:
        load_pretrained(model, str(folder))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in model.net.state_dict().items())


def test_options_of_sizes_and_of_training_alone_may_differ(tmp_path, new_spec, new_model, images):
    options = {"patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 2}
    parent = new_model("vit_tiny_patch16_224", options=options)
    save_model(tmp_path, parent, recipe_digest="")
    trained = {**options, "drop_path_rate": 0.1, "attn_drop_rate": 0.1, "drop_rate": 0.2}
    child = PixelModel(new_spec("vit_tiny_patch16_224", options=trained)).eval()
    load_pretrained(child, str(tmp_path))
    assert torch.equal(child(images), parent(images))


def test_weights_that_are_no_numbers_are_refused(tmp_path, new_spec, new_model):
    parent = new_model()
    parent.net.norm.bias.data[0] = torch.inf
    save_model(tmp_path, parent, recipe_digest="")
    with pytest.raises(CasemateError, match=r"hold NaN or infinity in norm\.bias"):
        load_pretrained(PixelModel(new_spec()), str(tmp_path))


def test_other_sizes_are_resampled(folder, new_spec, new_model):
    options = {**new_spec().options, "patch_size": 2}
    model = PixelModel(new_spec(image_size=16, options=options))
    report = load_pretrained(model, str(folder), kernel_method="sum")
    assert set(report.resampled) == {"pos_embed", "patch_embed.proj.weight"}
    parent = new_model().net
    kernel = resample_kernel(parent.patch_embed.proj.weight, (2, 2), method="sum")
    assert torch.equal(model.net.patch_embed.proj.weight, kernel)
    positions = resample_positions(parent.pos_embed, grid=(8, 8), num_prefix=1)
    assert torch.equal(model.net.pos_embed, positions)


def test_an_xcit_folder_serves_a_finer_stem(tmp_path, new_spec, new_model, images):
    coarse = {**new_spec().options, "patch_size": 8}
    save_model(tmp_path, new_model("tiny_xcit", options=coarse), recipe_digest="")
    model = PixelModel(new_spec("tiny_xcit")).eval()
    report = load_pretrained(model, str(tmp_path))
    assert set(report.loaded) == set(model.net.state_dict())
    assert model.net.patch_embed(images)[1] == (4, 4)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", r"model\.pretrained: nowhere is neither `timm` nor a model folder"),
        ("timm", r"model\.pretrained: timm has no weights for tiny_vit; .*import-weights"),
    ],
)
def test_sources_that_are_not_there(new_spec, source, message):
    with pytest.raises(CasemateError, match=message):
        load_pretrained(PixelModel(new_spec()), source)


@pytest.fixture
def timm_model(new_spec):
    half = (0.5,) * 3
    spec = new_spec("vit_tiny_patch16_224", options={"patch_size": 4}, mean=half, std=half)
    return PixelModel(spec)


def test_an_unreachable_hub_is_told_at_once_with_the_way_round(monkeypatch, tmp_path, timm_model):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    start = time.monotonic()
    with pytest.raises(CasemateError, match="import-weights") as caught:
        load_pretrained(timm_model, "timm")
    assert time.monotonic() - start < 10
    assert str(caught.value).startswith("model.pretrained: timm cannot fetch weights from http")
    assert "\n" not in str(caught.value)


def test_cached_hub_weights_need_no_hub(monkeypatch, tmp_path, timm_model):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    state = timm.create_model("vit_tiny_patch16_224").state_dict()
    save_file(state, tmp_path / "model.safetensors")
    monkeypatch.setattr(pretrained, "_cached_file", lambda _: str(tmp_path / "model.safetensors"))
    report = load_pretrained(timm_model, "timm")
    assert set(report.resampled) == {"pos_embed", "patch_embed.proj.weight"}
    assert report.fresh == ("head.weight", "head.bias")
    name = "blocks.7.attn.qkv.weight"
    assert torch.equal(timm_model.net.state_dict()[name], state[name])


def test_timm_weights_keep_their_options_and_normalisation(new_spec):
    """Told from timm's page about the weights: no hub is asked."""
    half = (0.5,) * 3
    for changes, message in (
        ({"options": {}, "std": half}, r"model\.mean: .* contradicts that of timm's vit_tiny"),
        (
            {"options": {"num_heads": 6}, "mean": half, "std": half},
            r"options\.num_heads: 6 changes",
        ),
    ):
        model = PixelModel(new_spec("vit_tiny_patch16_224", image_size=32, **changes))
        with pytest.raises(CasemateError, match=message):
            load_pretrained(model, "timm")
