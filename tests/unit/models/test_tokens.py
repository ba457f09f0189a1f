"""Token dropping: equal to masking keys by -inf, and blind to hidden pixels."""

import pytest
import torch
import torch.nn.functional as F

from components.core.errors import CasemateError
from components.data.ablation import column_mask
from components.models.tokens import kept_indices, visible_tokens

AVG = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "global_pool": "avg"}


def visible_columns(start: int, band: int, side: int = 16) -> torch.Tensor:
    return column_mask(side, start, band).expand(side, side)


def logits_with_masked_keys(net, inputs, keep, *, average):
    """The full sequence, written out by hand: dropped tokens stay, but no query sees them."""
    x = net.patch_embed.proj(inputs).flatten(2).transpose(1, 2)
    x = torch.cat([net.cls_token.expand(len(x), -1, -1), x], dim=1) + net.pos_embed
    seen = torch.cat([torch.ones(len(keep), 1, dtype=torch.bool), keep], dim=1)
    bias = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, float("-inf"))
    for block in net.blocks:
        attn, y = block.attn, block.norm1(x)
        batch, length, width = y.shape
        q, k, v = (
            part.view(batch, length, attn.num_heads, -1).transpose(1, 2)
            for part in attn.qkv(y).split(width, dim=2)
        )
        scores = q @ k.transpose(2, 3) / (width / attn.num_heads) ** 0.5
        weights = (scores + bias[:, None, None, :]).softmax(dim=-1)
        x = x + attn.proj((weights @ v).transpose(1, 2).reshape(batch, length, width))
        x = x + block.mlp(block.norm2(x))
    x = net.norm(x)
    if average:
        kept = keep[..., None].to(x.dtype)
        return net.head(net.fc_norm((x[:, 1:] * kept).sum(dim=1) / kept.sum(dim=1)))
    return net.head(x[:, 0])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize(("start", "band"), [(0, 3), (5, 4), (14, 5)])
def test_dropping_equals_masked_attention_keys(new_model, images, dtype, bound, pool, start, band):
    if pool == "token":
        model = new_model(token_policy="drop").to(dtype)
    else:
        model = new_model("vit_tiny_patch16_224", token_policy="drop", options=AVG).to(dtype)
    x, visible = images.to(dtype), visible_columns(start, band)
    shown = torch.where(visible, x, torch.zeros((), dtype=dtype))
    keep = F.unfold(visible[None, None].double(), 4, stride=4).amax(dim=1) > 0
    expected = logits_with_masked_keys(
        model.net, model.network_input(shown), keep.expand(len(x), -1), average=pool == "avg"
    )
    dropped = model.forward_ablated(x, visible)
    assert (dropped - expected).abs().max() < bound
    black = model.net(model.network_input(shown))  # black tokens take part: another classifier
    assert (dropped - black).abs().max() > 1e-3


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_all_tokens_kept_is_the_plain_forward_pass(new_model, images, pool):
    if pool == "token":
        model = new_model(token_policy="drop")
    else:
        model = new_model("vit_tiny_patch16_224", token_policy="drop", options=AVG)
    everything = torch.ones(16, 16, dtype=torch.bool)
    assert torch.equal(model.forward_ablated(images, everything), model(images))
    assert model.num_kept(everything[None]).tolist() == [16]


@pytest.mark.parametrize(
    ("architecture", "policy"), [("tiny_vit", "drop"), ("tiny_vit", "mask"), ("tiny_xcit", "mask")]
)
@pytest.mark.parametrize("poison", [0.0, 1.0, float("nan"), float("inf")])
def test_hidden_pixels_never_reach_the_logits(new_model, images, architecture, policy, poison):
    model = new_model(architecture, token_policy=policy)
    for start in range(0, 16, 3):
        visible = visible_columns(start, 5)
        attacked = torch.where(visible, images, torch.tensor(poison))
        logits = model.forward_ablated(images, visible)
        assert torch.equal(model.forward_ablated(attacked, visible), logits)
        seen = torch.where(visible, 1 - images, images)  # what is visible does matter
        assert not torch.equal(model.forward_ablated(seen, visible), logits)


def test_each_row_of_a_batch_has_its_own_mask(new_model, images):
    model = new_model(token_policy="drop").double()
    masks = torch.stack([visible_columns(start, 4) for start in (0, 4, 8)])  # one column of cells
    together = model.forward_ablated(images.double(), masks)
    for row, mask in enumerate(masks):
        alone = model.forward_ablated(images[row : row + 1].double(), mask)
        assert (together[row] - alone[0]).abs().max() < 1e-12


def test_rows_that_keep_different_counts_are_refused(new_model, images):
    model = new_model(token_policy="drop")
    masks = torch.stack([visible_columns(0, 4), visible_columns(1, 4), visible_columns(2, 4)])
    assert model.num_kept(masks).tolist() == [4, 8, 8]
    with pytest.raises(ValueError, match="same number of tokens"):
        model.forward_ablated(images, masks)


def test_one_visible_pixel_keeps_its_cell():
    visible = torch.zeros(2, 8, 12, dtype=torch.bool)
    visible[0, 7, 4] = True  # lower row of cells, second of three
    visible[1, 0, 11] = True
    keep = visible_tokens(visible, (4, 4))
    assert keep.shape == (2, 6)
    assert kept_indices(keep).tolist() == [[4], [2]]


def test_kept_tokens_of_the_specified_geometry():
    """224 pixels, patch 16, band 19: 28 tokens at 196 starts and 42 at 28."""
    starts = torch.stack([column_mask(224, q, 19) for q in range(224)])
    keep = visible_tokens(starts[:, None, :].expand(-1, 224, -1), (16, 16))
    counts, times = keep.sum(dim=1).unique(return_counts=True)
    assert dict(zip(counts.tolist(), times.tolist(), strict=True)) == {28: 196, 42: 28}


@pytest.mark.parametrize("architecture", ["tiny_xcit", "resnet10t"])
def test_networks_without_droppable_tokens_are_refused(new_model, architecture):
    options = {} if architecture == "resnet10t" else {"embed_dim": 16, "num_heads": 2, "depth": 1}
    with pytest.raises(CasemateError, match=r"model\.token_policy: drop needs a plain vision"):
        new_model(architecture, token_policy="drop", options=options)
