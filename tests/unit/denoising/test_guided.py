"""Checkpoints of guided- and improved-diffusion: the same function after the change of names."""

import re

import pytest
import torch
from safetensors.torch import save_file

from components.core.errors import CasemateError
from components.denoising.guided import head_width_of, layout_of, to_diffusers, unet_config
from components.denoising.importing import DenoiserTarget, attention_heads, import_denoiser
from components.denoising.loading import load_denoiser
from components.models.checkpoint import save_model
from tests.unit.denoising.guided_unet import GuidedUNet

CASES = {
    "guided": {},  # learned variance, scale and shift, residual resampling: DDS's ImageNet model
    "improved": {  # DDS's CIFAR model
        "resnet_resampling": False,
        "num_res": 2,
        "mults": (1, 2, 2),
        "attends": (False, True, True),
    },
    "plain": {"made": 3, "scale_shift": False, "resnet_resampling": False, "order": "new"},
    "attends-everywhere": {"attends": (True, True), "num_res": 2, "order": "new"},
    "attends-nowhere": {"attends": (False, False), "mults": (1, 1)},
}
HEADS = {  # numbers of heads in place of widths
    "one-width": {"num_heads": 4},
    "one-head-of-several-widths": {"num_heads": 1, "attends": (True, True)},
    "one-head-new-order": {"num_heads": 1, "attends": (True, True), "order": "new"},
}


def made_network(**changes):
    torch.manual_seed(0)
    net = GuidedUNet(**changes).eval()
    for value in net.parameters():  # no zeros and ones: every tensor must find its place
        torch.nn.init.normal_(value, std=0.1)
    return net


@pytest.mark.parametrize("case", [*CASES, *HEADS])
def test_the_imported_network_is_the_same_function(case, tmp_path, normals):
    shape = {**CASES, **HEADS}[case]
    theirs = made_network(**shape)
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    heads = {"num_heads": shape["num_heads"]} if "num_heads" in shape else {"head_width": 16}
    order = shape.get("order", "legacy")
    target = DenoiserTarget(image_size=16, attention_order=order, **heads)
    model, report = import_denoiser(tmp_path / "weights.safetensors", target)
    assert report.complete
    assert not report.fresh
    noisy, times = normals(2, 3, 16, 16), torch.tensor([3.0, 289.5])
    with torch.no_grad():
        torch.testing.assert_close(
            model.net(noisy, times), theirs(noisy, times), atol=2e-4, rtol=1e-4
        )


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_used_once(case):
    state = made_network(**CASES[case]).state_dict()
    renamed = to_diffusers(state, head_width=16)
    fused = sum(name.endswith(("qkv.weight", "qkv.bias")) for name in state)
    assert len(renamed) == len(state) + 2 * fused
    count = sum(value.numel() for value in state.values())
    assert sum(value.numel() for value in renamed.values()) == count
    layout, config = layout_of(state), unet_config(state, head_width=16)
    assert layout.num_layers == CASES[case].get("num_res", 1)
    assert len(config["block_out_channels"]) == len(layout.levels)


def test_the_order_of_queries_keys_and_values_matters(tmp_path, normals):
    theirs = made_network()
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    target = DenoiserTarget(image_size=16, head_width=16, attention_order="new")
    wrong, _ = import_denoiser(tmp_path / "weights.safetensors", target)
    noisy, times = normals(1, 3, 16, 16), torch.tensor([3.0])
    assert (wrong.net(noisy, times) - theirs(noisy, times)).abs().max() > 1e-2


def test_several_heads_of_several_widths_are_refused():
    state = made_network(attends=(True, True), num_heads=4).state_dict()
    with pytest.raises(CasemateError, match=r"8 of 32, 16 of 64 channels.*one attention_head_dim"):
        head_width_of(state, num_heads=4)
    with pytest.raises(CasemateError, match="--num-heads: 5 do not divide 32 channels"):
        head_width_of(state, num_heads=5)
    assert head_width_of(state, num_heads=1) is None


def test_the_heads_that_were_taken_can_be_told(tmp_path):
    save_file(made_network(attends=(True, True)).state_dict(), tmp_path / "weights.safetensors")
    model, _ = import_denoiser(
        tmp_path / "weights.safetensors", DenoiserTarget(image_size=16, head_width=16)
    )
    assert attention_heads(model) == {32: 2, 64: 4}


@pytest.mark.parametrize(
    "name",
    [
        "out.2.weight",
        "middle_block.0.emb_layers.1.weight",
        "input_blocks.1.0.out_layers.3.weight",
        "input_blocks.1.0.emb_layers.1.bias",
        "middle_block.1.qkv.weight",
    ],
)
def test_a_missing_tensor_is_named(name, tmp_path):
    state = made_network().state_dict()
    del state[name]
    save_file(state, tmp_path / "gone.safetensors")
    ours = {"middle_block.1.qkv.weight": "mid_block.attentions.0.to_k.weight"}
    ours["input_blocks.1.0.emb_layers.1.bias"] = "down_blocks.0.resnets.0.time_emb_proj.bias"
    with pytest.raises(CasemateError, match=re.escape(ours.get(name, f"{name} is missing"))):
        import_denoiser(tmp_path / "gone.safetensors", DenoiserTarget(16, head_width=16))


@pytest.mark.parametrize("kind", ["input_blocks", "output_blocks"])
def test_missing_blocks_are_told(kind):
    state = made_network().state_dict()
    last = max(int(name.split(".")[1]) for name in state if name.startswith(kind))
    cut = {k: v for k, v in state.items() if not k.startswith(f"{kind}.{last}.")}
    with pytest.raises(CasemateError, match="output_blocks differ in number from the input_blocks"):
        layout_of(cut)


def test_an_imported_denoiser_is_a_model_folder(tmp_path):
    state = made_network().state_dict()
    torch.save({f"module.{name}": value for name, value in state.items()}, tmp_path / "cifar.pt")
    target = DenoiserTarget(
        image_size=16, schedule="cosine", num_timesteps=4000, rescaled_time=True, head_width=16
    )
    model, _ = import_denoiser(tmp_path / "cifar.pt", target)
    save_model(tmp_path / "out", model, recipe_digest="none")
    denoiser = load_denoiser(f"model:{tmp_path / 'out'}")
    assert (denoiser.channels, denoiser.diffusion.variance) == (3, "learned_range")
    told = denoiser.diffusion.times(torch.tensor([1158.0, 1984.0, 2809.0]))
    assert told.tolist() == [289.5, 496.0, 702.25]
    assert denoiser.timestep(0.5) == pytest.approx(1157.513, abs=1e-3)


def test_what_cannot_be_imported(tmp_path):
    state = made_network().state_dict()
    with pytest.raises(CasemateError, match="label_emb"):
        layout_of({**state, "label_emb.weight": torch.zeros(10, 128)})
    with pytest.raises(CasemateError, match="--head-width: 48 does not divide 64"):
        unet_config(state, head_width=48)
    unattended = made_network(attends=(False, False)).state_dict()  # but for its middle
    with pytest.raises(CasemateError, match="--head-width: 48 does not divide 64"):
        unet_config(unattended, head_width=48)
    with pytest.raises(CasemateError, match="--attention-order: sideways"):
        to_diffusers(state, head_width=16, order="sideways")
    with pytest.raises(CasemateError, match="extra is not part of"):
        to_diffusers({**state, "extra": torch.zeros(1)}, head_width=16)
    save_file({"weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CasemateError, match="is not a UNet of guided"):
        import_denoiser(tmp_path / "other.safetensors", DenoiserTarget())
    save_file(state, tmp_path / "whole.safetensors")
    for target, words in (
        (DenoiserTarget(15, head_width=16), "--image-size: 15 is not a multiple of 2"),
        (DenoiserTarget(16, head_width=16, num_timesteps=1), "--timesteps: 1 are too few"),
        (DenoiserTarget(16, head_width=16, num_heads=4), "--num-heads: 4 and --head-width"),
    ):
        with pytest.raises(CasemateError, match=words):
            import_denoiser(tmp_path / "whole.safetensors", target)
    gone = {k: v for k, v in state.items() if k != "input_blocks.1.0.out_layers.0.weight"}
    save_file(gone, tmp_path / "gone.safetensors")
    with pytest.raises(CasemateError, match=r"lack down_blocks\.0\.resnets\.0\.norm2\.weight"):
        import_denoiser(tmp_path / "gone.safetensors", DenoiserTarget(16, head_width=16))
