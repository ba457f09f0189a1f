"""Weights of other projects: the logits of the original, or a line that names what does not fit.

Files of every layout are made on the spot from small networks, by renaming in the other direction.
"""

import argparse
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from components.core.errors import CasemateError
from components.models.checkpoint import load_model, save_model, weights_digest
from components.models.importing.layouts import unwrap
from components.models.importing.match import DoesNotFit
from components.models.importing.weights import Target, import_weights
from components.models.zoo import build_network

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
SMALL = {"embed_dim": 16, "depth": 2, "num_heads": 2}
State = dict[str, Tensor]


def network(architecture: str = "tiny_vit", size: int = 16, **options: Any) -> nn.Module:
    """A network whose every weight and statistic is off its initial value."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = build_network(
            architecture, image_size=size, channels=3, num_classes=5, options={**SMALL, **options}
        )
        net.load_state_dict(scrambled(net.state_dict()))
    return net.eval()


def scrambled(state: State) -> State:
    """Every weight and statistic off its initial value; variances stay positive."""
    noise = {
        name: torch.rand(value.shape) if "running" in name else 0.3 * torch.randn(value.shape)
        for name, value in state.items()
        if value.is_floating_point()
    }
    return {name: value + noise.get(name, 0) for name, value in state.items()}


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: value for name, value in state.items()}


def facebook_xcit(state: State) -> State:
    """facebookresearch/xcit: `pos_embeder`, and one projection in class attention."""
    renamed = {name.replace("pos_embed.", "pos_embeder."): v for name, v in state.items()}
    for query in [name for name in renamed if re.match(r"cls_attn_blocks\.\d+\.attn\.q\.", name)]:
        parts = [query.replace(".q.", f".{part}.") for part in "qkv"]
        renamed[query.replace(".q.", ".qkv.")] = torch.cat([renamed.pop(part) for part in parts])
    return renamed


def hugging_face(state: State) -> State:
    """ViTForImageClassification: query, key and value apart, an unused pooler."""
    layer = "vit.encoder.layer."
    renamed: State = {"vit.pooler.dense.weight": torch.zeros(16, 16)}
    for name, value in state.items():
        match = re.match(r"blocks\.(\d+)\.(.+)\.(weight|bias)$", name)
        if match is None:
            stem, _, part = name.rpartition(".")
            top = {
                "patch_embed.proj": "vit.embeddings.patch_embeddings.projection.",
                "norm": "vit.layernorm.",
                "head": "classifier.",
            }
            whole = {
                "cls_token": "vit.embeddings.cls_token",
                "pos_embed": "vit.embeddings.position_embeddings",
            }
            renamed[whole.get(name) or top[stem] + part] = value
            continue
        index, inner, part = match.groups()
        if inner == "attn.qkv":
            for word, rows in zip(("query", "key", "value"), value.chunk(3), strict=True):
                renamed[f"{layer}{index}.attention.attention.{word}.{part}"] = rows
            continue
        hf = {
            "norm1": "layernorm_before",
            "norm2": "layernorm_after",
            "attn.proj": "attention.output.dense",
            "mlp.fc1": "intermediate.dense",
            "mlp.fc2": "output.dense",
        }[inner]
        renamed[f"{layer}{index}.{hf}.{part}"] = value
    return renamed


def statistics(*names: str) -> State:
    shape = (1, 3, 1, 1)
    return {
        name: torch.tensor(values).view(shape)
        for name, values in zip(names, (MEAN, STD), strict=True)
    }


def robustness_library(state: State) -> State:
    """AttackerModel in DataParallel: a normaliser inside a pre-processor, and all of it twice."""
    model = prefixed("model.model.", state) | statistics(
        "normalizer.normalizer.new_mean", "normalizer.normalizer.new_std"
    )
    copy = prefixed("attacker.model.model.", state) | statistics(
        "attacker.normalize.new_mean", "attacker.normalize.new_std"
    )
    return prefixed("module.", model | copy)


class Case(NamedTuple):
    layout: str  # what is found in the file
    make: Callable[[State], Any]  # content of the file, from timm's names
    architecture: str = "tiny_vit"
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    inside: bool = False  # the file brings mean and std along


def deit3(state: State) -> State:
    return {re.sub(r"ls(\d)\.gamma", r"gamma_\1", name): value for name, value in state.items()}


CASES = {
    "timm": Case("timm", dict),
    "timm-parallel": Case("timm", lambda s: {"state_dict": prefixed("module.", s), "epoch": 3}),
    "timm-compiled": Case("timm", lambda s: {"model_ema": prefixed("_orig_mod.", s)}),
    "deit": Case("timm", lambda s: {"model": s, "args": argparse.Namespace(lr=1.0), "epoch": 2}),
    "deit-distilled": Case(
        "timm", lambda s: {"model": s}, "deit_tiny_distilled_patch16_224", {"patch_size": 4}
    ),
    "deit-3": Case(
        "timm", lambda s: {"model": deit3(s)}, "deit3_small_patch16_224", {"patch_size": 4}
    ),
    "xcit-facebook": Case(
        "xcit", lambda s: {"model": facebook_xcit(s)}, "tiny_xcit", {"cls_attn_layers": 2}
    ),
    "xcit-debenedetti": Case("timm", dict, "tiny_xcit"),
    "robustbench": Case(
        "robustbench",
        lambda s: prefixed("model.", s) | statistics("normalize.mean", "normalize.std"),
        inside=True,
    ),
    "robustbench-mu": Case(
        "robustbench",
        lambda s: {"state_dict": prefixed("module.", s | statistics("mu", "sigma"))},
        inside=True,
    ),
    "smoothed-vit": Case(
        "smoothed-vit",
        lambda s: {"model": robustness_library(s), "optimizer": {"state": {}}, "epoch": 29},
        inside=True,
    ),
    "hf-vit": Case("hf-vit", hugging_face),
}


@pytest.fixture
def images() -> Tensor:
    return torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def target(architecture: str = "tiny_vit", **changes: Any) -> Target:
    fields: dict[str, Any] = {"image_size": 16, "mean": MEAN, "std": STD, "options": SMALL}
    return Target(architecture, **{**fields, **changes})


def write(path: Path, content: Any) -> Path:
    save_file(content, path) if path.suffix == ".safetensors" else torch.save(content, path)
    return path


@pytest.mark.parametrize("name", CASES)
def test_every_layout_gives_the_logits_of_the_original(tmp_path, images, name):
    case = CASES[name]
    net = network(case.architecture, **case.options)
    file = write(tmp_path / "weights.pth", case.make(net.state_dict()))
    known = {"mean": None, "std": None} if case.inside else {}
    options = {**SMALL, **case.options}
    imported = import_weights(file, target(case.architecture, options=options, **known))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    expected = net((images - mean) / std)
    assert expected.std(dim=0).max() > 1e-2  # logits that tell images apart
    torch.testing.assert_close(imported.model(images), expected, atol=1e-6, rtol=1e-6)
    assert imported.layout == case.layout
    assert imported.report.complete
    assert set(imported.report.loaded) == set(net.state_dict())
    assert imported.model.spec.num_classes == 5
    assert imported.model.spec.trained_for["imported_from"] == "weights.pth"

    save_model(tmp_path / "model", imported.model, recipe_digest="")
    assert torch.equal(load_model(tmp_path / "model")(images), imported.model(images))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("deit", "deit"),
        ("deit-3", "deit"),
        ("xcit-facebook", "xcit"),
        ("xcit-debenedetti", "xcit"),
        ("hf-vit", "hf-vit"),
        ("robustbench", "robustbench"),
        ("smoothed-vit", "smoothed-vit"),
    ],
)
def test_a_named_layout_is_taken_at_its_word(tmp_path, name, layout):
    case = CASES[name]
    net = network(case.architecture, **case.options)
    file = write(tmp_path / "weights.pt", case.make(net.state_dict()))
    options = {**SMALL, **case.options}
    imported = import_weights(file, target(case.architecture, options=options), layout=layout)
    assert imported.layout == layout
    assert imported.model.spec.trained_for["layout"] == layout


def test_safetensors_and_chosen_entries(tmp_path, images):
    state = network().state_dict()
    other = {name: value + 1 for name, value in state.items()}
    plain = import_weights(write(tmp_path / "w.safetensors", state), target())
    both = write(tmp_path / "w.pth", {"model": state, "model_ema": other})
    assert import_weights(both, target()).entry == "model"
    assert torch.equal(import_weights(both, target()).model(images), plain.model(images))
    averaged = import_weights(both, target(), entry="model_ema")
    assert averaged.entry == "model_ema"
    assert torch.equal(averaged.model.net.head.weight, other["head.weight"])
    with pytest.raises(CasemateError, match=r"--entry: ema is not in .*\['model', 'model_ema'\]"):
        import_weights(both, target(), entry="ema")


def test_positions_and_patches_are_resampled_and_said_to_be(tmp_path):
    file = write(tmp_path / "w.pth", network().state_dict())
    larger = import_weights(file, target(image_size=32))
    assert larger.report.resampled == {"pos_embed": ((1, 17, 16), (1, 65, 16))}
    finer = import_weights(file, target(image_size=8, options={**SMALL, "patch_size": 2}))
    assert list(finer.report.resampled) == ["patch_embed.proj.weight"]
    assert any("resampled  patch_embed" in line for line in finer.report.lines())


def test_what_surrounds_the_network_is_inside_the_model(tmp_path):
    """Native 8 x 8 pixels, up-sampled by nearest neighbour before they are normalised."""
    net = network()
    file = write(tmp_path / "w.pth", net.state_dict())
    imported = import_weights(file, target(image_size=8, upsample=16, token_policy="drop"))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    x = torch.rand(3, 3, 8, 8)
    upsampled = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    torch.testing.assert_close(imported.model(x), net((upsampled - mean) / std))
    assert imported.model.spec.token_policy == "drop"


def test_an_xcit_for_cifar_is_imported_with_its_finer_stem(tmp_path):
    """A 16-pixel stem whose first two strides are 1: the file cannot say so, the option does."""
    options = {**SMALL, "stem_patch": 4}
    net = network("xcit_nano_12_p16_224", size=32, stem_patch=4)
    file = write(tmp_path / "w.pth.tar", {"model": net.state_dict()})
    aim = target("xcit_nano_12_p16_224", image_size=32, options=options)
    imported = import_weights(file, aim, layout="xcit")
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    x = torch.rand(2, 3, 32, 32)
    assert imported.model.net.patch_embed(x)[1] == (8, 8)
    torch.testing.assert_close(imported.model(x), net((x - mean) / std))
    save_model(tmp_path / "model", imported.model, recipe_digest="")
    assert torch.equal(load_model(tmp_path / "model")(x), imported.model(x))


class Payload:
    def __reduce__(self):
        return print, ("code of the file ran",)


def test_code_in_a_file_is_refused_and_never_run(tmp_path, capsys):
    file = tmp_path / "evil.pth"
    torch.save({"model": network().state_dict(), "extra": Payload()}, file)
    with pytest.raises(
        CasemateError, match=r"evil\.pth needs Python code .* not allowed"
    ) as caught:
        import_weights(file, target())
    assert "\n" not in str(caught.value)
    whole = tmp_path / "module.pth"
    torch.save(network(), whole)
    with pytest.raises(CasemateError, match=r"module\.pth needs Python code"):
        import_weights(whole, target())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("damage", ["cut", "empty", "text", "gone", "start"])
def test_damaged_files_are_named_in_one_line(tmp_path, suffix, damage):
    file = write(tmp_path / f"weights{suffix}", network().state_dict())
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        damaged = {"cut": content[:-500], "empty": b"", "text": b"no weights", "start": content[9:]}
        file.write_bytes(damaged[damage])
    with pytest.raises(CasemateError, match=rf"weights: .*weights\{suffix} ") as caught:
        import_weights(file, target())
    assert "\n" not in str(caught.value)


def test_junk_is_shown_as_what_it_begins_with(tmp_path):
    file = tmp_path / "junk.pth"
    for content, reason in (
        (b"junk\n", r"is not a torch file: it begins with b'junk"),
        (b"version https://git-lfs", r"begins with b'version "),
        (b"", "is not a torch file: it is empty"),
    ):
        file.write_bytes(content)
        with pytest.raises(CasemateError, match=reason):
            import_weights(file, target())


@given(st.binary(max_size=12))
def test_no_damage_of_a_pickle_passes_for_a_fault_of_ours(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "damaged.pth"
    file.write_bytes(b"\x80\x02" + content)
    with pytest.raises(CasemateError, match=r"weights: .*damaged\.pth ") as caught:
        import_weights(file, target())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {"history": {"loss": 1.0}}])
def test_files_without_a_state_dict(tmp_path, content):
    file = write(tmp_path / "w.pth", content)
    with pytest.raises(CasemateError, match=r"holds (a list, not|no tensors)"):
        import_weights(file, target())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": None}, r"--mean: \? is not in .*w\.pth; give .* \(0,0,0 for raw \[0, 1\]"),
        ({"std": None}, r"--std: \? is not in .*w\.pth"),
        ({"mean": (0.5,)}, r"--mean: \(0\.5,\) needs 3 values"),
        ({"std": (1.0, 0.0, 1.0)}, r"--std: .* must be finite and positive"),
        ({"std": (float("nan"), 1.0, 1.0)}, r"--std: \(nan, .* must be finite and positive"),
        ({"mean": (123.7, 116.3, 103.5)}, r"--mean: .* is outside \[0, 1\]; pixels are fractions"),
        ({"mean": (0.0, float("inf"), 0.0)}, r"--mean: .* must be finite"),
        ({"image_size": None, "upsample": 32}, r"--image-size: .* native side .* up-sampled to 32"),
        ({"architecture": "tiny_vitt"}, r"--architecture: tiny_vitt is unknown"),
        ({"options": {"depht": 2}}, r"do not fit tiny_vit"),
    ],
)
def test_targets_that_say_too_little_or_nonsense(tmp_path, changes, message):
    file = write(tmp_path / "w.pth", network().state_dict())
    with pytest.raises(CasemateError, match=message):
        import_weights(file, target(**{"architecture": "tiny_vit", **changes}))


def test_statistics_that_contradict_the_file(tmp_path):
    content = CASES["robustbench"].make(network().state_dict())
    file = write(tmp_path / "w.pth", content)
    assert import_weights(file, target()).model.spec.mean == MEAN  # agreeing is fine
    with pytest.raises(CasemateError, match=r"--mean: .* contradicts \(0\.4, 0\.5, 0\.6\) in"):
        import_weights(file, target(mean=(0.5, 0.5, 0.5)))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("hf-vit", "hf-vit does not fit: .* looks like timm"),
        ("smoothed-vit", "smoothed-vit does not fit"),
        ("xcit", "xcit does not fit"),
        ("jax", r"jax is unknown; one of \['auto', "),
    ],
)
def test_layouts_that_the_file_does_not_have(tmp_path, layout, message):
    file = write(tmp_path / "w.pth", network().state_dict())
    with pytest.raises(CasemateError, match=message):
        import_weights(file, target(), layout=layout)


def refused(file: Path, aim: Target, **options: Any) -> DoesNotFit:
    with pytest.raises(DoesNotFit) as caught:
        import_weights(file, aim, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_one_renamed_key_is_named_on_both_sides(tmp_path):
    state = network().state_dict()
    state["blocks.1.norm3.weight"] = state.pop("blocks.1.norm1.weight")
    error = refused(write(tmp_path / "w.pth", state), target())
    assert error.report.missing == ("blocks.1.norm1.weight",)
    assert error.report.unused == ("blocks.1.norm3.weight",)
    assert "lack blocks.1.norm1.weight" in str(error)
    assert "hold blocks.1.norm3.weight" in str(error)
    assert "missing    blocks.1.norm1.weight" in error.report.lines()
    again = pickle.loads(pickle.dumps(error))  # workers send errors home
    assert str(again) == str(error)
    assert again.report == error.report


def test_a_truncated_network_is_refused(tmp_path, images):
    """Three blocks into two: every tensor of the network is set, and its logits are wrong."""
    deep = network(depth=3)
    file = write(tmp_path / "w.pth", deep.state_dict())
    error = refused(file, target())
    assert not error.report.complete
    assert error.report.missing == ()
    assert error.report.unused[0] == "blocks.2.norm1.weight"
    assert "hold blocks.2.norm1.weight" in str(error)
    assert "--allow-unused" in str(error)
    error = refused(file, target(), allow_unused=["blocks.2.mlp.*"])
    assert not any(name.startswith("blocks.2.mlp.") for name in error.report.unused)
    cut = import_weights(file, target(), allow_unused=["blocks.2.*"])
    assert len(cut.report.ignored) == 12
    assert "ignored    blocks.2.norm1.weight" in cut.report.lines()
    deep.blocks = deep.blocks[:2]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    torch.testing.assert_close(cut.model(images), deep((images - mean) / std))


@pytest.mark.parametrize(
    "name",
    [
        *("pooler.dense.weight", "head_dist.weight", "normalize.extra", "sub_block1.layer.0.bias"),
        *("blocks.0.attn_mask", "blocks.0.attn.relative_position_index"),
        "norm.num_batches_tracked",
    ],
)
def test_idle_tensors_are_reported_and_left_out(tmp_path, name):
    file = write(tmp_path / "w.pth", {**network().state_dict(), name: torch.zeros(2)})
    report = import_weights(file, target()).report
    assert report.complete
    assert report.ignored == (name,)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path, value):
    state = network().state_dict()
    state["blocks.1.norm1.weight"][3] = value
    file = write(tmp_path / "w.pth", state)
    with pytest.raises(CasemateError, match=r"w\.pth hold NaN or infinity in blocks\.1\.norm1"):
        import_weights(file, target())


def test_another_architecture_and_another_class_count_are_told_with_shapes(tmp_path):
    file = write(tmp_path / "w.pth", network().state_dict())
    error = refused(file, target("tiny_xcit"))
    assert "cls_attn_blocks.0.attn.q.weight" in error.report.missing
    assert "more" in str(error)
    error = refused(file, target(num_classes=7))
    assert error.report.mismatched == {
        "head.weight": ((5, 16), (7, 16)),
        "head.bias": ((5,), (7,)),
    }
    assert "head.weight (5, 16) for (7, 16)" in str(error)
    assert error.report.to_dict()["complete"] is False
    error = refused(file, target(options={**SMALL, "embed_dim": 32}))
    assert error.report.mismatched["pos_embed"] == ((1, 17, 16), (1, 17, 32))


def test_a_facebook_xcit_of_another_depth_is_refused(tmp_path):
    state = facebook_xcit(network("tiny_xcit").state_dict())
    file = write(tmp_path / "w.pth", state)
    aim = target("tiny_xcit", options={**SMALL, "cls_attn_layers": 2})
    with pytest.raises(CasemateError, match=r"cls_attn_blocks\.1"):
        import_weights(file, aim)


def test_what_may_be_missing_is_named_by_globs(tmp_path):
    file = write(tmp_path / "w.pth", network().state_dict())
    first = import_weights(file, target(num_classes=7), allow_missing=["head.*"])
    torch.rand(1)  # whatever was drawn before
    second = import_weights(file, target(num_classes=7), allow_missing=["head.*"])
    assert first.report.fresh == ("head.weight", "head.bias")
    assert first.model.net.head.weight.shape == (7, 16)
    assert weights_digest(first.model) == weights_digest(second.model)  # fresh, but always the same
    error = refused(file, target(num_classes=7), allow_missing=["head.weight"])
    assert list(error.report.mismatched) == ["head.bias"]


def test_a_headless_file_needs_the_number_of_classes(tmp_path):
    state = {k: v for k, v in network().state_dict().items() if not k.startswith("head.")}
    file = write(tmp_path / "w.pth", state)
    with pytest.raises(CasemateError, match=r"--classes: .*w\.pth has no class head"):
        import_weights(file, target())
    imported = import_weights(file, target(num_classes=9), allow_missing=["head.*"])
    assert imported.model.spec.num_classes == 9


WIDE = {"layers": (1, 2, 1)}


def trades_names(state: State) -> State:
    """The wide ResNet of TRADES: `block1.layer.0.bn1`, a linear head."""
    renames = [
        (r"^stem\.conv", "conv1"),
        (r"^norm\.", "bn1."),
        (r"^stages\.0\.", "block1."),
        (r"^stages\.1\.", "block2."),
        (r"^stages\.2\.", "block3."),
        (r"\.blocks\.", ".layer."),
        (r"\.norm", ".bn"),
        (r"downsample\.conv", "convShortcut"),
        (r"^head\.fc", "fc"),
    ]
    renamed = {}
    for name, value in state.items():
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    renamed["fc.weight"] = renamed["fc.weight"].flatten(1)
    return renamed


def active_in(state: State, name: str, x: Tensor) -> Tensor:
    """Batch norm with the stored statistics, then ReLU."""
    parts = (state[f"{name}.{p}"] for p in ("running_mean", "running_var", "weight", "bias"))
    return F.relu(F.batch_norm(x, *parts))


def wide_resnet_by_hand(state: State, x: Tensor) -> Tensor:
    """Zagoruyko & Komodakis 2016 from a TRADES state dict: norm, ReLU, convolution, twice."""
    active = partial(active_in, state)
    x = F.conv2d(x, state["conv1.weight"], padding=1)
    for group, num_blocks in enumerate(WIDE["layers"], start=1):
        for index in range(num_blocks):
            block = f"block{group}.layer.{index}"
            stride = 2 if group > 1 and index == 0 else 1
            inner = active(f"{block}.bn1", x)
            if index == 0:
                x = F.conv2d(inner, state[f"{block}.convShortcut.weight"], stride=stride)
            inner = F.conv2d(inner, state[f"{block}.conv1.weight"], stride=stride, padding=1)
            inner = active(f"{block}.bn2", inner)
            x = x + F.conv2d(inner, state[f"{block}.conv2.weight"], padding=1)
    return F.linear(active("bn1", x).mean(dim=(2, 3)), state["fc.weight"], state["fc.bias"])


def test_wide_resnets_of_robustbench(tmp_path, images):
    net = build_network("wrn_28_10", image_size=16, channels=3, num_classes=5, options=WIDE)
    state = trades_names(scrambled(net.state_dict()))
    content = prefixed("model.", state) | statistics("normalize.mean", "normalize.std")
    file = write(tmp_path / "w.pt", {"state_dict": prefixed("module.", content)})
    imported = import_weights(file, target("wrn_28_10", mean=None, std=None, options=WIDE))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    expected = wide_resnet_by_hand(state, (images - mean) / std)
    torch.testing.assert_close(imported.model(images), expected, rtol=1e-4, atol=0.0)
    assert imported.report.unused == ()


PREACT = {"layers": (2, 1, 2), "widths": (8, 16, 24)}


def preact_names(state: State) -> State:
    """RobustBench's PreAct ResNet: `layer1.0.bn1`, `shortcut.0`, a linear head called linear."""
    renamed = {}
    for name, value in state.items():
        name = re.sub(r"^stages\.(\d)\.blocks", lambda m: f"layer{int(m[1]) + 1}", name)
        name = re.sub(r"^norm\.", "bn.", re.sub(r"\.norm(\d)", r".bn\1", name))
        name = name.replace("stem.conv", "conv1").replace("downsample.conv", "shortcut.0")
        renamed[name.replace("head.fc", "linear")] = value
    renamed["linear.weight"] = renamed["linear.weight"].flatten(1)
    return renamed


def preact_by_hand(state: State, x: Tensor) -> Tensor:
    """The kind whose shortcut starts behind a block's first norm and ReLU."""
    active = partial(active_in, state)
    x = F.conv2d(x, state["conv1.weight"], padding=1)
    for group, num_blocks in enumerate(PREACT["layers"], start=1):
        for index in range(num_blocks):
            block, stride = f"layer{group}.{index}", 2 if group > 1 and index == 0 else 1
            inner = active(f"{block}.bn1", x)
            if stride == 2:
                x = F.conv2d(inner, state[f"{block}.shortcut.0.weight"], stride=2)
            inner = F.conv2d(inner, state[f"{block}.conv1.weight"], stride=stride, padding=1)
            x = x + F.conv2d(
                active(f"{block}.bn2", inner), state[f"{block}.conv2.weight"], padding=1
            )
    pooled = active("bn", x).mean(dim=(2, 3))
    return F.linear(pooled, state["linear.weight"], state["linear.bias"])


def test_preact_resnets_of_robustbench(tmp_path, images):
    net = build_network("preact_resnet18", image_size=16, channels=3, num_classes=5, options=PREACT)
    state = preact_names(scrambled(net.state_dict()))
    file = write(tmp_path / "w.pt", state | statistics("mu", "sigma"))
    aim = target("preact_resnet18", mean=None, std=None, options=PREACT)
    imported = import_weights(file, aim)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    expected = preact_by_hand(state, (images - mean) / std)
    assert expected.std(dim=0).max() > 1e-2
    torch.testing.assert_close(imported.model(images), expected, rtol=1e-4, atol=1e-5)
    assert (imported.layout, imported.report.ignored) == ("robustbench", ())
    assert imported.model.spec.num_classes == 5

    older = {name: value for name, value in state.items() if not name.startswith("bn.")}
    file = write(tmp_path / "older.pt", older | statistics("mu", "sigma"))
    with pytest.raises(CasemateError, match=r"no norm before its head .* a different function"):
        import_weights(file, aim)


def test_only_wrappers_that_all_tensors_share_are_taken_off():
    tensors = {"model.a": torch.zeros(1), "model.model.b": torch.zeros(1)}
    assert set(unwrap(tensors).state) == {"a", "model.b"}
    assert set(unwrap({**tensors, "head": torch.zeros(1)}).state) == {*tensors, "head"}
