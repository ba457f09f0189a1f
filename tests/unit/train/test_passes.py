"""Precision, compiled code and recomputed activations change no result by more than rounding."""

import sys
from dataclasses import replace

import _distutils_hack
import pytest
import torch

from components.core.errors import CasemateError
from components.models.compiling import compile_network
from components.models.networks.preact import preact_resnet18
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from components.train.objectives.base_settings import AasTrainingSettings
from components.train.objectives.settings import FgsmTrainingSettings
from components.train.passes import (
    is_convolutional,
    precision_on,
    prepare_passes,
    recompute_activations,
)
from components.train.session import initial_model
from components.train.settings import TrainSettings


@pytest.mark.parametrize(
    ("asked", "found"),
    [("auto", "float32"), ("float32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")],
)
def test_results_name_the_precision_that_was_used(asked, found, toy_spec):
    train = TrainSettings(precision=asked)
    assert precision_on(train, "cpu") == found
    assert prepare_passes(initial_model(toy_spec, seed=0), train).precision == found


def test_auto_takes_the_fastest_of_a_gpu(monkeypatch):
    fast = {"bfloat16", "tf32"}
    monkeypatch.setattr("components.core.precision.is_fast", lambda name, device: name in fast)
    assert precision_on(TrainSettings(precision="auto"), "cuda") == "bfloat16"
    fast = {"tf32"}
    assert precision_on(TrainSettings(precision="auto"), "cuda") == "tf32"
    fast = set()
    assert precision_on(TrainSettings(precision="auto"), "cuda") == "float32"


def gradients(model: PixelModel, images: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model.train()(images).square().sum().backward()
    return [weight.grad.clone() for weight in model.parameters()]


@pytest.mark.parametrize("architecture", ["tiny_vit", "tiny_xcit"])
def test_recomputed_activations_give_the_same_gradients(architecture, toy_spec):
    model = initial_model(replace(toy_spec, architecture=architecture, token_policy="mask"), seed=0)
    images = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before = gradients(model, images)
    calls: list[bool] = []
    model.net.blocks[0].register_forward_pre_hook(lambda *_: calls.append(True))
    passes = prepare_passes(model, TrainSettings(recompute=True))
    after = gradients(model, images)
    assert passes.recomputed
    assert len(calls) == 2  # once more in the backward pass
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_a_network_without_the_switch_is_refused_in_one_line():
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    with pytest.raises(CasemateError, match=r"^train\.recompute: true does not fit.*leave it out$"):
        recompute_activations(network)


def test_which_networks_are_convolutional(toy_spec):
    assert is_convolutional(preact_resnet18(image_size=32, channels=3, num_classes=2))
    for architecture in ("tiny_vit", "tiny_xcit"):
        spec = replace(toy_spec, architecture=architecture, token_policy="mask")
        assert not is_convolutional(PixelModel(spec).net)


def broken_compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
    raise RuntimeError("no compiler here\nand more")


def test_where_compiling_fails_the_network_goes_on_and_says_why(toy_spec, monkeypatch):
    model = initial_model(toy_spec, seed=0).train()
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before = model(images)
    torch._dynamo.reset()  # it gives up after some networks of one class
    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda net: real(net, backend=broken_compiler))
    why = compile_network(model)
    assert why is not None
    assert "no compiler here" in why
    assert "\n" not in why
    assert model.training
    assert torch.equal(model(images), before)


def test_aas_cannot_be_compiled():
    objective = FgsmTrainingSettings(eps=0.1, aas=AasTrainingSettings())
    with pytest.raises(ValueError, match="compiled: true cannot be combined with aas"):
        TrainSettings(objective=objective, compiled=True)


@pytest.fixture
def distutils():
    """That of setuptools, which torch's compiler imports: pip has hidden it if it is loaded."""
    vars(_distutils_hack.DISTUTILS_FINDER).pop("spec_for_distutils", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "distutils"]:
        del sys.modules[name]


@pytest.mark.cluster
@pytest.mark.usefixtures("distutils")
def test_a_compiled_network_computes_the_same(toy_spec):
    spec: ModelSpec = replace(toy_spec, token_policy="mask")
    plain, compiled = initial_model(spec, seed=0), initial_model(spec, seed=0)
    passes = prepare_passes(compiled, TrainSettings(compiled=True))
    assert passes.compiled, passes.why_eager
    assert passes.why_eager is None
    images = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    pairs = zip(gradients(plain, images), gradients(compiled, images), strict=True)
    assert all(torch.allclose(a, b, atol=1e-5, rtol=1e-4) for a, b in pairs)
    assert list(compiled.state_dict()) == list(plain.state_dict())
