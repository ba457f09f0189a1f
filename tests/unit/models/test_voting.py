"""Votes of column ablations: one at a time is the truth, batching may not change it."""

import pytest
import torch

from components.models.voting import column_masks, column_predictions, group_by_tokens


def vote_one_at_a_time(model, images, *, band, stride):
    rows = []
    for image in images:
        labels = []
        for start in range(0, 16, stride):
            columns = [(start + offset) % 16 for offset in range(band)]
            visible = torch.zeros(16, 16, dtype=torch.bool)
            visible[:, columns] = True
            logits = model.forward_ablated(image[None], visible)[0].tolist()
            labels.append(logits.index(max(logits)))  # first maximum: ties to the lowest class
        rows.append(labels)
    return rows


@pytest.mark.parametrize("policy", ["drop", "mask"])
@pytest.mark.parametrize(("band", "stride", "micro_batch"), [(5, 1, 64), (3, 1, 4), (6, 5, 1)])
def test_votes_equal_single_ablations(new_model, images, policy, band, stride, micro_batch):
    model = new_model(token_policy=policy)
    with torch.inference_mode():
        expected = vote_one_at_a_time(model, images, band=band, stride=stride)
    votes = column_predictions(model, images, band=band, stride=stride, micro_batch=micro_batch)
    assert votes.dtype == torch.int64
    assert votes.tolist() == expected
    assert len(set(votes.flatten().tolist())) > 1  # otherwise anything would agree


def test_votes_do_not_depend_on_the_other_images(new_model, images):
    model = new_model(token_policy="drop")
    settings = {"band": 5, "stride": 1, "micro_batch": 6}
    together = column_predictions(model, images, **settings)
    assert torch.equal(column_predictions(model, images.flip(0), **settings), together.flip(0))
    for row in range(len(images)):
        alone = column_predictions(model, images[row : row + 1], **settings)
        assert torch.equal(alone[0], together[row])
    assert column_predictions(model, images[:0], **settings).shape == (0, 16)


def test_plans_follow_the_settings(new_model, images):
    """The plan is remembered per model and settings: a second call must not get the first one's."""
    model = new_model(token_policy="drop")
    shapes = [
        column_predictions(model, images[:1], band=band, stride=stride, micro_batch=8).shape[1]
        for band, stride in [(5, 1), (5, 2), (4, 5)]
    ]
    assert shapes == [16, 8, 4]


def test_ties_go_to_the_lowest_class(new_model, images):
    model = new_model()
    torch.nn.init.zeros_(model.net.head.weight)
    torch.nn.init.zeros_(model.net.head.bias)
    votes = column_predictions(model, images, band=4, stride=4, micro_batch=8)
    assert (votes == 0).all()


def test_training_mode_is_refused(new_model, images):
    with pytest.raises(ValueError, match="eval mode"):
        column_predictions(new_model().train(), images, band=4, stride=1, micro_batch=8)


def test_groups_hold_every_ablation_once_with_equal_counts(new_model):
    model = new_model(token_policy="drop")
    masks = column_masks(model, band=5, stride=1)
    groups = group_by_tokens(model, masks)
    assert sorted(index for group in groups for index in group.tolist()) == list(range(16))
    for group in groups:
        assert len({model.num_kept(masks[index]) for index in group.tolist()}) == 1
