"""Votes of ablations: one at a time is the truth, no faster backend may change it."""

from dataclasses import replace

import pytest
import torch

from components.core.errors import CasemateError
from components.data.ablation import Ablations
from components.models import partial_tokens, voting
from components.models.masked_votes import group_by_tokens
from components.models.vote_plan import plan_for
from components.models.voting import (
    FAST,
    PLAIN,
    AblationPredictor,
    ablation_predictions,
    column_predictions,
)
from tests.unit.host_syncs import DEVICE, HostSyncs

CPU = torch.device("cpu")


def ablations_of(kind="columns", *, band, stride=1):
    return Ablations(kind=kind, image_size=(16, 16), band=band, stride=stride)


def predictor(model, ablations, micro_batch, backend=FAST):
    return AblationPredictor(model, ablations, micro_batch=micro_batch, backend=backend)


def vote_one_at_a_time(model, images, ablations):
    rows = []
    with torch.inference_mode():
        for image in images:
            logits = [model.forward_ablated(image[None], m)[0].tolist() for m in ablations.masks()]
            rows.append([row.index(max(row)) for row in logits])  # ties to the lowest class
    return rows


@pytest.mark.parametrize("policy", ["drop", "mask"])
@pytest.mark.parametrize(
    ("kind", "band", "stride", "micro_batch"),
    [
        *[("columns", 5, 1, 64), ("columns", 3, 1, 4), ("columns", 6, 5, 1)],
        *[("rows", 5, 3, 7), ("blocks", 6, 4, 9), ("both", 4, 5, 5), ("columns", 14, 3, 6)],
    ],
)
def test_votes_equal_single_ablations(new_model, images, policy, kind, band, stride, micro_batch):
    model, ablations = new_model(token_policy=policy), ablations_of(kind, band=band, stride=stride)
    votes = ablation_predictions(model, images, ablations, micro_batch=micro_batch)
    assert votes.dtype == torch.int64
    assert votes.tolist() == vote_one_at_a_time(model, images, ablations)
    assert len(set(votes.flatten().tolist())) > 1  # otherwise anything would agree


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("resnet18", {"options": {}}),
        ("tiny_vit", {"token_policy": "drop", "upsample": 32}),
        ("tiny_vit", {"token_policy": "drop", "upsample": 32, "upsample_mode": "bilinear"}),
    ],
)
def test_other_networks_and_sizes(new_model, images, architecture, changes):
    model, ablations = new_model(architecture, **changes), ablations_of(band=3, stride=3)
    votes = ablation_predictions(model, images[:2], ablations, micro_batch=4)
    assert votes.tolist() == vote_one_at_a_time(model, images[:2], ablations)


@pytest.mark.parametrize(("kind", "stride"), [("columns", 1), ("blocks", 5)])
def test_votes_do_not_depend_on_the_other_images(new_model, images, monkeypatch, kind, stride):
    model, ablations = new_model(token_policy="drop"), ablations_of(kind, band=5, stride=stride)
    together = ablation_predictions(model, images, ablations, micro_batch=6)
    flipped = ablation_predictions(model, images.flip(0), ablations, micro_batch=6)
    assert torch.equal(flipped, together.flip(0))
    for row in range(len(images)):
        alone = ablation_predictions(model, images[row : row + 1], ablations, micro_batch=5)
        assert torch.equal(alone[0], together[row])
    monkeypatch.setattr(voting, "TABLE_BYTES", 1)  # tables so large that images vote one by one
    assert torch.equal(ablation_predictions(model, images, ablations, micro_batch=6), together)
    none = ablation_predictions(model, images[:0], ablations, micro_batch=6)
    assert none.shape == (0, len(ablations))


@pytest.mark.parametrize("policy", ["drop", "mask"])
def test_quick_votes_alone_are_right_too(new_model, images, policy):
    """Close calls are taken again; everything else must stand by itself."""
    model, ablations = new_model(token_policy=policy), ablations_of(band=5)
    ask = predictor(model, ablations, 7)
    assert (ask.packed is not None) == (ask.stem is not None) == (policy == "drop")
    with torch.inference_mode():
        votes, nearly_tied = ask._fast_votes(images, ask._requested(None))
    assert votes.tolist() == vote_one_at_a_time(model, images, ablations)
    assert nearly_tied.float().mean() < 0.1


def test_a_predictor_votes_again_and_again(new_model, images):
    """Nothing of an image is left for the next one."""
    model, ablations = new_model(token_policy="drop"), ablations_of(band=5)
    ask = predictor(model, ablations, 7)
    truth = vote_one_at_a_time(model, images, ablations)
    for row in (1, 0, 1):
        assert ask(images[row : row + 1]).tolist() == truth[row : row + 1]


def test_close_calls_are_decided_by_one_ablation_at_a_time(new_model, images, monkeypatch):
    """Wrong by more than any rounding, for rows in doubt only: the votes must not show it."""
    model, ablations = new_model(token_policy="drop"), ablations_of(band=5)
    truth = vote_one_at_a_time(model, images, ablations)
    quick = AblationPredictor._fast_votes

    def spoiled(*args):
        votes, _ = quick(*args)
        doubt = torch.arange(votes.numel()).view(votes.shape) % 3 == 0
        return torch.where(doubt, (votes + 1) % 5, votes), doubt

    monkeypatch.setattr(AblationPredictor, "_fast_votes", spoiled)
    assert ablation_predictions(model, images, ablations, micro_batch=8).tolist() == truth


@pytest.mark.parametrize("kind", ["columns", "blocks"])
def test_votes_wait_for_a_device_once_however_many_passes_they_take(
    new_model, images, monkeypatch, kind
):
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # the stand-in knows no other
    ablations, micro_batch = ablations_of(kind, band=5, stride=3), 7
    model = new_model(token_policy="drop")
    truth = vote_one_at_a_time(model, images, ablations)
    counts = []
    with HostSyncs() as syncs:
        ask = predictor(model.to(DEVICE), ablations, micro_batch)
        for some in (images[:1], images, images.repeat(9, 1, 1, 1)):
            syncs.clear()
            found = ask(some)
            counts.append(syncs.count)
    assert counts[0] == counts[1] == counts[2] <= 2, syncs.places
    assert found[: len(images)].tolist() == truth


def test_reduced_precision_is_decided_in_float32_in_batches(new_model, images, monkeypatch):
    """Every vote in doubt: passes of many rows decide them, and only close calls go one by one."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setitem(voting.TIE_TOLERANCE, "bfloat16", 10.0)
    model, ablations = new_model(token_policy="drop"), ablations_of(band=5)
    ask, alone = predictor(model, ablations, 8, replace(FAST, precision="bfloat16")), []
    truth, plain = vote_one_at_a_time(model, images, ablations), model.forward_ablated
    monkeypatch.setattr(model, "forward_ablated", lambda *args: alone.append(1) or plain(*args))
    votes = ask(images)
    assert votes.tolist() == truth
    assert len(alone) < 0.1 * votes.numel()
    quick = AblationPredictor._fast_votes

    def spoiled(own, *args):  # wrong in bfloat16: nothing of it may stay
        found, close = quick(own, *args)
        return ((found + 1) % 5 if own is ask else found), close

    monkeypatch.setattr(AblationPredictor, "_fast_votes", spoiled)
    assert ask(images).tolist() == truth


@pytest.mark.parametrize(
    ("votes_each", "together"), [(4, 16), (1, 64), (8, 8), (16, 8), (0, 64), (3, 22)]
)
def test_images_together_fill_a_pass(new_model, votes_each, together):
    ask = predictor(new_model(token_policy="drop"), ablations_of(band=5), 64)
    assert ask._images_together(votes_each) == together


def test_what_is_close():
    nan = float("nan")
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.99999], [100.0, 99.999], [nan, 0.0], [2.0, 2.0]])
    assert voting._is_close(logits, voting.TIE_TOLERANCE["float32"]).tolist() == [
        False,
        *[True] * 4,
    ]
    assert voting._is_close(torch.ones(2, 1), 0.1).tolist() == [True, True]  # one class: no rival


def test_order_asks_only_for_some(new_model, images):
    model, ablations = new_model(token_policy="drop"), ablations_of("both", band=5, stride=2)
    votes = ablation_predictions(model, images, ablations, micro_batch=4)
    order = [13, 0, 7]
    some = ablation_predictions(model, images, ablations, micro_batch=4, order=order)
    assert torch.equal(some, votes[:, order])


@pytest.mark.parametrize("backend", [FAST, PLAIN])
def test_every_ablation_can_be_asked_alone(new_model, images, backend):
    """Also where the groups of other token counts have nothing to do."""
    model, ablations = new_model(token_policy="drop"), ablations_of("blocks", band=6, stride=5)
    assert len(plan_for(model, ablations, in_cells=True, device=CPU).groups) > 1
    votes = ablation_predictions(model, images, ablations, micro_batch=4, backend=backend)
    for k in range(len(ablations)):
        alone = ablation_predictions(
            model, images, ablations, micro_batch=4, order=[k], backend=backend
        )
        assert torch.equal(alone[:, 0], votes[:, k])


def test_plans_follow_the_settings(new_model, images):
    """The plan is remembered per model and settings: a second call must not get the first one's."""
    model = new_model(token_policy="drop")
    for band, stride, count in [(5, 1, 16), (5, 2, 8), (4, 5, 4)]:
        votes = column_predictions(model, images[:1], band=band, stride=stride, micro_batch=8)
        assert votes.tolist() == vote_one_at_a_time(
            model, images[:1], ablations_of(band=band, stride=stride)
        )
        assert votes.shape == (1, count)


def test_weights_are_read_in_every_call(new_model, images):
    model, ablations = new_model(token_policy="drop"), ablations_of(band=5)
    before = ablation_predictions(model, images, ablations, micro_batch=8)
    with torch.no_grad():
        model.net.patch_embed.proj.weight.neg_()
        model.net.pos_embed.neg_()
    after = ablation_predictions(model, images, ablations, micro_batch=8)
    assert after.tolist() == vote_one_at_a_time(model, images, ablations)
    assert not torch.equal(before, after)


def test_ties_go_to_the_lowest_class(new_model, images):
    model = new_model(token_policy="drop")
    torch.nn.init.zeros_(model.net.head.weight)
    torch.nn.init.zeros_(model.net.head.bias)
    assert (column_predictions(model, images, band=4, stride=4, micro_batch=8) == 0).all()


def test_a_watched_stem_still_votes(new_model, images):
    model, ablations, seen = new_model(token_policy="drop"), ablations_of(band=5), []
    truth = vote_one_at_a_time(model, images, ablations)
    model.net.patch_embed.register_forward_hook(lambda *_: seen.append(1))
    assert ablation_predictions(model, images, ablations, micro_batch=8).tolist() == truth
    assert len(seen) >= 6  # 48 ablated images


def test_compiled_blocks_see_one_shape_per_group(new_model, images, monkeypatch):
    """Not really compiled, which takes a minute: what the compiled code would be called with."""
    model, ablations, shapes = new_model(token_policy="drop"), ablations_of(band=5, stride=2), []

    def compiled(kind):
        def forward(block, tokens):
            shapes.append(tuple(tokens.shape))
            return kind.forward(block, tokens)

        return forward

    monkeypatch.setattr(voting, "_compiled_forward", compiled)
    backend = replace(FAST, compiled=True)
    votes = ablation_predictions(model, images, ablations, micro_batch=5, backend=backend)
    assert votes.tolist() == vote_one_at_a_time(model, images, ablations)
    assert len(shapes) == 5  # of 24 ablations, in the first of two blocks
    assert set(shapes) == {(5, 1 + 8, 16)}
    assert not any("forward" in vars(block) for block in model.net.blocks)
    assert predictor(model, ablations, 3, backend).agrees_with_plain()


def test_precision_is_refused_where_it_only_costs(new_model, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    for precision in ("bfloat16", "tf32", "float16"):
        with pytest.raises(CasemateError, match="is not supported by this processor"):
            predictor(new_model(), ablations_of(band=5), 4, replace(FAST, precision=precision))
    with pytest.raises(CasemateError, match="not one of float32"):
        replace(FAST, precision="int8")
    with pytest.raises(ValueError, match="plain path is float32"):
        replace(PLAIN, precision="bfloat16")


@pytest.mark.parametrize(("kind", "stride"), [("columns", 2), ("blocks", 5)])
def test_reduced_precision_keeps_the_votes(new_model, images, monkeypatch, kind, stride):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    model, ablations = new_model(token_policy="drop"), ablations_of(kind, band=5, stride=stride)
    backend = replace(FAST, precision="bfloat16")
    votes = ablation_predictions(model, images, ablations, micro_batch=8, backend=backend)
    assert votes.tolist() == vote_one_at_a_time(model, images, ablations)
    assert 1e-5 < predictor(model, ablations, 8, backend).difference_to_plain() < 2**-4


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("tiny_vit", {"token_policy": "drop"}),
        ("tiny_vit", {"token_policy": "mask"}),
        ("resnet18", {"options": {}}),
    ],
)
def test_the_fast_path_is_compared_with_the_plain_one(
    new_model, images, monkeypatch, architecture, changes
):
    model = new_model(architecture, **changes)
    for kind in ("columns", "blocks"):
        ablations = ablations_of(kind, band=5, stride=3)
        assert predictor(model, ablations, 7).agrees_with_plain()
        plain = ablation_predictions(model, images, ablations, micro_batch=7, backend=PLAIN)
        assert torch.equal(ablation_predictions(model, images, ablations, micro_batch=7), plain)
    if changes.get("token_policy") == "drop":  # sums of other lines than the visible ones
        right = partial_tokens._Scan.__call__
        monkeypatch.setattr(
            partial_tokens._Scan,
            "__call__",
            lambda *args: {k: v * (1 + 0.1 * k) for k, v in right(*args).items()},
        )
        assert not predictor(model, ablations_of(band=5), 7).agrees_with_plain()
        assert predictor(model, ablations_of(band=5), 7, PLAIN).agrees_with_plain()


def test_wrong_calls(new_model, images):
    model, ablations = new_model(), ablations_of(band=4)
    with pytest.raises(ValueError, match="eval mode"):
        ablation_predictions(new_model().train(), images, ablations, micro_batch=8)
    with pytest.raises(ValueError, match="micro_batch"):
        ablation_predictions(model, images, ablations, micro_batch=0)
    other = Ablations(kind="columns", image_size=(8, 8), band=4, stride=1)
    with pytest.raises(ValueError, match="do not fit"):
        ablation_predictions(model, images, other, micro_batch=8)


def test_groups_hold_every_ablation_once_with_equal_counts(new_model):
    model, masks = new_model(token_policy="drop"), ablations_of(band=5).masks()
    groups = group_by_tokens(model, masks)
    assert sorted(index for group in groups for index in group.tolist()) == list(range(16))
    for group in groups:
        assert len(model.num_kept(masks[group]).unique()) == 1


def test_a_predictor_refuses_other_images_and_a_changed_model(new_model, images):
    model, ablations = new_model(token_policy="drop"), ablations_of(band=5)
    ask = predictor(model, ablations, 7)
    for side in (8, 32):
        with pytest.raises(CasemateError, match="is not the 3x16x16"):
            ask(torch.rand(1, 3, side, side))
    with torch.no_grad():
        model.net.blocks[0].attn.qkv.weight.mul_(-0.7)
    with pytest.raises(ValueError, match="construct a new predictor"):
        ask(images)


def test_a_new_predictor_sees_changes_that_leave_no_trace(new_model, images):
    model, ablations = new_model(token_policy="drop"), ablations_of(band=5)
    ablation_predictions(model, images, ablations, micro_batch=7)
    model.net.blocks[0].attn.qkv.weight.data.mul_(-0.7)
    truth = vote_one_at_a_time(model, images, ablations)
    assert ablation_predictions(model, images, ablations, micro_batch=7).tolist() == truth
