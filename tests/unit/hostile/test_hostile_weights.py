"""Weights and model folders of an attacker: no code runs, no memory is filled, one line is said."""

import json
import pickle
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.denoising.loading import load_denoiser
from components.models.checkpoint import load_model, save_model
from components.models.importing.match import load_matching
from components.models.importing.read import read_checkpoint
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from tests.e2e.cli import mistake_of
from tests.unit.hostile.attacks import DEEP, MARK, QUITE_DEEP, Payload, refusal, safetensors

SPEC = ModelSpec(
    *("tiny_vit", 5, 1, 8, (0.5,), (0.5,)),
    options={"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
)


@pytest.fixture
def model(tmp_path):
    """A model folder that an attacker may change."""
    save_model(tmp_path / "model", PixelModel(SPEC), recipe_digest="")
    return tmp_path / "model"


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".safetensors"])
@pytest.mark.parametrize("form", ["zip", "legacy", "pickle", "protocol 0"])
def test_code_in_weights_never_runs(tmp_path, suffix, form):
    path, content = tmp_path / f"evil{suffix}", {"model": {"w": torch.ones(1)}, "extra": Payload()}
    if form == "zip":
        torch.save(content, path)
    elif form == "legacy":
        torch.save(content, path, _use_new_zipfile_serialization=False)
    else:
        path.write_bytes(pickle.dumps(Payload(), protocol=0 if form == "protocol 0" else 4))
    out = tmp_path / "out"
    line = mistake_of("import-weights", path, "--out", out, "--architecture", "tiny_vit")
    assert line.startswith(f"weights: {path} ")
    assert not out.exists()


def test_code_in_a_denoiser_of_diffusers_never_runs(tmp_path):
    from diffusers import DDPMScheduler, UNet2DModel

    sizes = {"sample_size": 8, "block_out_channels": (8,), "norm_num_groups": 2}
    kinds = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    UNet2DModel(**sizes, **kinds).save_pretrained(tmp_path / "unet")
    DDPMScheduler().save_pretrained(tmp_path / "scheduler")
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    torch.save({"w": Payload()}, tmp_path / "unet" / "diffusion_pytorch_model.bin")
    refusal(lambda: load_denoiser(f"diffusers:{tmp_path}"), "denoiser: ", "cannot be loaded")


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({"w": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4]}}, None),
        ({"w": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}, None),
        ({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, None),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, None),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**62]}}, None),
        ({"w": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 4]}}, None),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 2**63),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 99_999_999),
        (DEEP, None),
    ],
)
def test_safetensors_that_lie_about_their_sizes(tmp_path, header, length):
    path = safetensors(tmp_path / "w.safetensors", header, b"abcd", length)
    refusal(lambda: read_checkpoint(path), f"weights: {path} cannot be read as safetensors")


def test_a_tensor_that_repeats_one_value_a_trillion_times(tmp_path):
    """A view with strides of zero takes four bytes in the file."""
    path = tmp_path / "w.pth"
    torch.save({"head.weight": torch.ones(1).expand(10**6, 10**6)}, path)
    origin, net = ("weights", str(path)), PixelModel(SPEC).net
    state = read_checkpoint(path).tensors
    refusal(lambda: load_matching(net, state, origin=origin, remedy=""), f"weights: {path} ")


def test_a_member_of_a_torch_file_that_unpacks_to_gigabytes(tmp_path):
    whole = tmp_path / "whole.pth"
    torch.save({"w": torch.zeros(4)}, whole)
    path = tmp_path / "bomb.pth"
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            bomb = member.filename.endswith("data/0")
            new.writestr(member.filename, bytes(2**28) if bomb else old.read(member))
    refusal(lambda: read_checkpoint(path), f"weights: {path} ")


@pytest.mark.parametrize(
    "content",
    [
        DEEP, QUITE_DEEP, b"\xff\xfe{", b"[]", b'{"format": 1}', b"1" * 5000, b"NaN",
        b'{"format": 1, "spec": [], "digest": "a"}', b'{"format": 1, "spec": {}, "digest": 5}',
    ],
)  # fmt: skip
def test_model_json(model, content):
    (model / "model.json").write_bytes(content)
    refusal(lambda: load_model(model), str(model / "model.json"))


@pytest.mark.parametrize(
    "change",
    [
        {"num_classes": 10**13}, {"num_classes": -1}, {"num_classes": "5"},
        {"image_size": 10**9}, {"channels": 10**6, "mean": [0.5] * 10**6, "std": [1.0] * 10**6},
        {"upsample": 10**9}, {"architecture": ["tiny_vit"]}, {"architecture": "hf-hub:evil/model"},
        {"options": {"embed_dim": 10**9}}, {"options": {"depth": 10**9}}, {"options": []},
        {"options": {"checkpoint_path": "evil.pth"}}, {"options": {"pretrained": True}},
        {"mean": "x"},
        {"std": [0.0]}, {"architecture": "vit_tiny_patch16_224", "image_size": 2**16},
    ],
)  # fmt: skip
def test_specs_that_no_model_has(model, change):
    header = json.loads((model / "model.json").read_text())
    header["spec"] |= change
    (model / "model.json").write_text(json.dumps(header))
    refusal(lambda: load_model(model))


def test_code_of_a_model_runs_only_if_its_digest_is_that_of_the_spec(model):
    """A model of somebody's own architecture runs code by design: this one was exchanged."""
    header = json.loads((model / "model.json").read_text())
    header["spec"]["architecture"] = "python:net.py@0123456789abcdef:build"
    (model / "model.json").write_text(json.dumps(header))
    copy = model / "code" / "casemate_user_0123456789abcdef"
    copy.mkdir(parents=True)
    (copy / "net.py").write_text(f"open({MARK!r}, 'w').close()")
    refusal(lambda: load_model(model), "has a modified copy")


@pytest.mark.parametrize("change", ["other weights", "other shapes", "missing", "no file"])
def test_weights_that_are_not_those_of_the_spec(model, change):
    path = model / "model.safetensors"
    state = load_file(path)
    name = min(state)
    if change == "other weights":
        save_file({**state, name: state[name] + 1}, path)
    elif change == "other shapes":
        save_file({**state, name: torch.zeros(3)}, path)
    elif change == "missing":
        save_file({k: v for k, v in state.items() if k != name}, path)
    else:
        shutil.rmtree(model)
        model.mkdir()
    refusal(lambda: load_model(model), str(model))
