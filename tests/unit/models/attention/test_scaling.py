"""Pre-softmax scales: no bit moves at 1, and hooks, folded weights and timm's own scale agree."""

import copy

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import XCA
from torch import nn
from torch.func import functional_call, grad

from components.core.errors import CasemateError
from components.models.attention.discover import attention_of
from components.models.attention.scaling import (
    attach_scales,
    detach_scales,
    fold_scales,
    scaled_attention,
)


def ones(net: nn.Module) -> torch.Tensor:
    return torch.ones(len(attention_of(net)))


def uneven(net: nn.Module) -> torch.Tensor:
    return torch.linspace(0.3, 1.9, len(attention_of(net)))


def with_own_scale(net: nn.Module, scales: torch.Tensor) -> nn.Module:
    """The oracle: timm's own factor, which its explicit path obeys."""
    net = copy.deepcopy(net)
    for site, scale in zip(attention_of(net), scales.tolist(), strict=True):
        if isinstance(site.module, XCA):
            site.module.temperature.data.mul_(scale)
        else:
            site.module.scale *= scale
        site.module.fused_attn = False
    return net


def test_a_scale_of_one_moves_no_bit(net_either_path, x):
    net = net_either_path
    x = x.requires_grad_()
    plain = net(x)
    (plain_grad,) = torch.autograd.grad(plain.square().sum(), x)
    with scaled_attention(net, ones(net)):
        hooked = net(x)
        (hooked_grad,) = torch.autograd.grad(hooked.square().sum(), x)
    assert torch.equal(hooked, plain)
    assert torch.equal(hooked_grad, plain_grad)
    fold_scales(net, ones(net))
    assert torch.equal(net(x), plain)


def test_scales_equal_timms_own_factor(net_either_path, x):
    net = net_either_path
    expected = with_own_scale(net, uneven(net))(x)
    plain = net(x)
    with scaled_attention(net, uneven(net)):
        hooked = net(x)
    assert torch.allclose(hooked, expected, rtol=1e-4, atol=1e-5)  # float32, another order of sums
    assert not torch.allclose(hooked, plain, rtol=1e-3, atol=1e-3)
    assert torch.equal(net(x), plain)


def test_folded_weights_equal_hooks(net_either_path, x):
    net = net_either_path
    with scaled_attention(net, uneven(net)):
        hooked = net(x)
    fold_scales(net, uneven(net))
    assert (net(x) - hooked).abs().max() < 1e-5
    assert list(ones(net)) == [1] * len(attention_of(net))  # still a network with access


def test_batch_statistics_do_not_undo_a_scale(new_net, x):
    """LeViT normalises queries over the batch in train mode: the factor must come after that."""
    net = new_net("levit").train()
    twin = with_own_scale(net, uneven(net))
    with scaled_attention(net, uneven(net)):
        assert torch.allclose(net(x), twin(x), rtol=1e-4, atol=1e-5)


def test_every_module_has_its_own_scale(net, x):
    outputs = []
    for index in range(len(attention_of(net))):
        scales = ones(net)
        scales[index] = 0.2
        with scaled_attention(net, scales):
            outputs.append(net(x))
    for index, output in enumerate([net(x), *outputs]):
        assert not any(torch.equal(output, other) for other in outputs[index:])


def test_gradient_of_scales_by_finite_differences(net, x):
    net, x = net.double().requires_grad_(False), x.double()
    scales = uneven(net).double()

    def loss(values: torch.Tensor) -> torch.Tensor:
        with scaled_attention(net, values):
            return net(x).square().sum()

    (exact,) = torch.autograd.grad(loss(leaf := scales.clone().requires_grad_()), leaf)
    step = 1e-5
    with torch.no_grad():
        numeric = [
            (loss(scales + shift) - loss(scales - shift)) / (2 * step)
            for shift in torch.eye(len(scales)).double() * step
        ]
    assert torch.allclose(exact, torch.stack(numeric), rtol=1e-5, atol=1e-6 * exact.abs().max())
    assert exact.abs().min() > 0
    assert torch.allclose(grad(loss)(scales), exact)  # and under torch.func


def test_functional_calls_see_their_own_weights(new_net, x):
    net = new_net("vit")
    others = {name: value.detach() * 1.1 for name, value in net.named_parameters()}
    twin = copy.deepcopy(net)
    twin.load_state_dict(others)
    with scaled_attention(net, uneven(net)):
        hooked = functional_call(net, others, (x,))
    with scaled_attention(twin, uneven(net)):
        assert torch.equal(twin(x), hooked)


def test_many_backward_passes_inside_and_after_the_context(new_net, x):
    net = new_net("vit")
    scales = uneven(net).requires_grad_()
    with scaled_attention(net, scales):
        first = [torch.autograd.grad(net(x).sum(), scales)[0] for _ in range(2)]
        loss = net(x).sum()
    (late,) = torch.autograd.grad(loss, scales)
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], late)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_after_an_exception(net, x, error):
    before = {name: value.clone() for name, value in net.state_dict().items()}
    parameters = list(net.parameters())
    plain = net(x)

    def fail(*_: object) -> None:
        raise error

    site = attention_of(net)[-1]
    handle = site.module.proj.register_forward_hook(fail)
    with pytest.raises(error), scaled_attention(net, uneven(net)):
        net(x)
    handle.remove()
    assert torch.equal(net(x), plain)
    assert list(net.state_dict()) == list(before)  # the order too: optimizers count by it
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_parameters_are_untouched_inside(new_net, x):
    net = new_net("cait")
    names = [name for name, _ in net.named_parameters()]
    with scaled_attention(net, uneven(net)):
        net(x)
        assert [name for name, _ in net.named_parameters()] == names
        assert not any("weight" in vars(module) for module in net.modules())


def test_nested_scales_multiply(new_net, x):
    net = new_net("xcit")
    with scaled_attention(net, uneven(net)), scaled_attention(net, uneven(net)):
        nested = net(x)
    with scaled_attention(net, uneven(net) ** 2):
        assert torch.allclose(net(x), nested, atol=1e-5)


def test_attached_scales_are_learned_and_follow_the_weights(net, x):
    attach_scales(net, nn.Parameter(uneven(net)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    net(x).square().sum().backward()
    assert net.attention_scales.grad.abs().min() > 0
    optimizer.step()
    assert "attention_scales" in net.state_dict()
    moved = net(x)
    scales = detach_scales(net)
    assert "attention_scales" not in net.state_dict()
    assert not torch.equal(scales, uneven(net))
    assert not torch.equal(net(x), moved)
    with scaled_attention(net, scales):
        assert torch.equal(net(x), moved)


def test_a_copy_reads_its_own_scales(new_net, x):
    """Weight averaging deep-copies networks: hooks of the copy must not reach back."""
    net = new_net("vit")
    plain = net(x)
    attach_scales(net, ones(net))
    twin = copy.deepcopy(net)
    net.attention_scales.fill_(0.1)
    assert torch.equal(twin(x), plain)
    with torch.no_grad():
        net.blocks[0].attn.qkv.weight.zero_()
    assert torch.equal(twin(x), plain)
    detach_scales(twin)
    assert not torch.equal(net(x), plain)  # the original is still scaled
    twin.attention_scales = None
    assert torch.equal(twin(x), plain)


def test_attached_scales_survive_compilation_and_recomputation(new_net, x):
    net = new_net("vit")
    attach_scales(net, uneven(net))
    expected = net(x)
    assert torch.allclose(torch.compile(net, backend="eager")(x), expected, atol=1e-6)
    net.set_grad_checkpointing(True)
    gradients = []
    for recompute in (True, False):
        net.set_grad_checkpointing(recompute)
        leaf = x.clone().requires_grad_()
        gradients += torch.autograd.grad(net(leaf).sum(), leaf)
    assert torch.allclose(*gradients, atol=1e-6)


def test_wrong_calls_are_refused(new_net):
    net = new_net("vit")
    with pytest.raises(ValueError, match="each of 2 attention modules"):
        fold_scales(net, torch.ones(3))
    with pytest.raises(ValueError, match="no attached scales"):
        detach_scales(net)
    attach_scales(net, torch.ones(2))
    with pytest.raises(ValueError, match="detach them first"):
        attach_scales(net, torch.ones(2))


def test_a_query_norm_without_weights_is_refused():
    class Plain(nn.LayerNorm):
        def __init__(self, dim: int, **_: object) -> None:
            super().__init__(dim, elementwise_affine=False)

    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    net = VisionTransformer(**shape, qk_norm=True, norm_layer=Plain)
    message = r"blocks\.0\.attn\.q_norm normalises queries"
    with pytest.raises(CasemateError, match=message):
        fold_scales(net, torch.ones(1))
    with pytest.raises(CasemateError, match=message), scaled_attention(net, torch.ones(1)):
        pass


@pytest.mark.parametrize("architecture", ["tiny_vit", "tiny_xcit"])
def test_scales_work_inside_the_pixel_adapter(new_model, images, architecture):
    model = new_model(architecture)
    with scaled_attention(model.net, uneven(model.net)):
        hooked = model(images)
    plain = model(images)
    fold_scales(model.net, uneven(model.net))
    assert torch.allclose(model(images), hooked, atol=1e-5)
    assert not torch.allclose(hooked, plain, atol=1e-3)
