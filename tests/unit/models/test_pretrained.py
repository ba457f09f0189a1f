"""Starting weights: a folder of ours or timm's hub, adapted and accounted for."""

import time

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


@pytest.fixture
def folder(tmp_path, new_model):
    save_model(tmp_path / "parent", new_model(), recipe_digest="")
    return tmp_path / "parent"


def test_a_folder_of_the_same_spec_gives_the_same_model(folder, new_spec, new_model, images):
    model = PixelModel(new_spec()).eval()
    report = load_pretrained(model, str(folder))
    assert torch.equal(model(images), new_model()(images))
    assert set(report.loaded) == set(model.net.state_dict())
    assert report.notes == ()


def test_other_classes_get_a_fresh_head_and_keep_the_rest(folder, new_spec, new_model):
    model = PixelModel(new_spec(num_classes=9, mean=(0.0,) * 3, std=(1.0,) * 3))
    head = model.net.head.weight.clone()
    report = load_pretrained(model, str(folder))
    assert report.fresh == ("head.weight", "head.bias")
    assert torch.equal(model.net.head.weight, head)
    parent = new_model().net.state_dict()
    for name in report.loaded:
        assert torch.equal(model.net.state_dict()[name], parent[name])
    assert len(report.loaded) == len(parent) - 2
    assert "mean (0.4, 0.5, 0.6)" in report.notes[0]


def test_a_head_is_only_left_out_for_other_classes(monkeypatch, tmp_path, new_spec, new_model):
    parent = new_model()
    parent.net.head = torch.nn.Sequential(parent.net.head)  # the same classes by another name
    monkeypatch.setattr(pretrained, "load_model", lambda _: parent)
    with pytest.raises(DoesNotFit, match=r"lack head\.weight"):
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


def test_weights_of_another_network_leave_the_model_alone(folder, new_spec):
    model = PixelModel(new_spec("tiny_xcit"))
    before = {name: value.clone() for name, value in model.net.state_dict().items()}
    with pytest.raises(DoesNotFit, match=r"lack patch_embed\.proj\.0\.0\.weight"):
        load_pretrained(model, str(folder))
    after = model.net.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


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
    options = {"patch_size": 4}
    return PixelModel(new_spec("vit_tiny_patch16_224", options=options))


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
    assert "mean (0.5, 0.5, 0.5)" in report.notes[0]
