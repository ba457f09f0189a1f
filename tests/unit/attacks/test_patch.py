"""The patch attack on small voters whose every ablation can be recounted by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from components.attacks.gradients import attack_mode
from components.attacks.patch import attack_vote, rank_positions
from components.data.ablation import Ablations
from components.models import masked_votes

SIDE = 8
CELL = 4  # columns per token of the stand-in


class LinearVoter(nn.Module):
    """Linear in the visible pixels; refuses batches whose rows keep different numbers of tokens."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight = nn.Parameter(weight)  # (K, C, H, W)
        self.bias = nn.Parameter(bias)
        self.rows_seen = []

    def num_kept(self, visible):
        return visible.any(dim=1).unflatten(1, (-1, CELL)).any(dim=2).sum(dim=1)

    def forward_ablated(self, x, visible):
        assert len(self.num_kept(visible).unique()) == 1
        self.rows_seen.append(len(x))
        shown = torch.where(visible[:, None], x, torch.zeros(()))
        return shown.flatten(1) @ self.weight.flatten(1).T + self.bias


def brightness_voter(threshold):
    """Class 1 where the visible pixels are bright: a white square is enough."""
    weight = torch.stack([torch.zeros(1, SIDE, SIDE), torch.ones(1, SIDE, SIDE)])
    return LinearVoter(weight, torch.tensor([threshold, 0.0])).eval()


def checker_voter(threshold):
    """Class 1 where odd rows outshine even rows: no even constant square helps, gradients do."""
    rows = torch.tensor([-1.0, 1.0]).repeat(SIDE // 2).view(1, SIDE, 1).expand(1, SIDE, SIDE)
    weight = torch.stack([torch.zeros(1, SIDE, SIDE), rows])
    return LinearVoter(weight, torch.tensor([threshold, 0.0])).eval()


def visible_mask(start, band):
    mask = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    mask[:, [(start + i) % SIDE for i in range(band)]] = True
    return mask


def recount(model, image, *, band, stride):
    """Every ablation alone, straight from the definition."""
    with torch.no_grad():
        votes = [
            model.forward_ablated(image[None], visible_mask(start, band)[None]).argmax(dim=1)
            for start in range(0, SIDE, stride)
        ]
    return torch.cat(votes)


def touched(left, *, band, stride, patch):
    columns = set(range(left, left + patch))
    return torch.tensor(
        [
            bool(columns & {(start + i) % SIDE for i in range(band)})
            for start in range(0, SIDE, stride)
        ]
    )


def winner(votes):
    counts = votes.bincount()
    return int((counts == counts.max()).nonzero()[0])


def masks_of(*, band, stride):
    return torch.stack([visible_mask(start, band) for start in range(0, SIDE, stride)])


def run(model, image, label, predictions, *, band, stride, patch, positions, num_steps=6, seed=0):
    return attack_vote(
        model,
        image,
        label,
        predictions,
        masks_of(band=band, stride=stride),
        patch=patch,
        num_steps=num_steps,
        step_size=0.2,
        positions=positions,
        generator=torch.Generator().manual_seed(seed),
        micro_batch=3,
    )


def assert_explained(result, model, image, clean, *, band, stride, patch):
    """The result follows from the returned image alone."""
    top, left = result.position
    outside = torch.ones(SIDE, SIDE, dtype=torch.bool)
    outside[top : top + patch, left : left + patch] = False
    assert torch.equal(result.x_adv[:, outside], image[:, outside])
    assert 0 <= result.x_adv.min() <= result.x_adv.max() <= 1
    votes = recount(model, result.x_adv, band=band, stride=stride)
    hit = touched(left, band=band, stride=stride, patch=patch)
    assert torch.equal(votes[~hit], clean[~hit])
    assert winner(votes) == result.prediction


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_any_voter_any_geometry(data, seed):
    band, stride, patch = (data.draw(st.integers(1, high)) for high in (SIDE, 5, 4))
    corner = st.integers(0, SIDE - patch)
    positions = data.draw(st.lists(st.tuples(corner, corner), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 2, SIDE, SIDE, generator=generator)
    bias = data.draw(st.sampled_from([0.0, 2.0, 6.0])) * torch.tensor([0.0, 1.0, 0.0])
    model = LinearVoter(weight, bias).eval()
    image = torch.rand(2, SIDE, SIDE, generator=generator)
    clean = recount(model, image, band=band, stride=stride)
    label = winner(clean)
    model.rows_seen.clear()
    geometry = {"band": band, "stride": stride, "patch": patch}
    result = run(model, image, label, clean, **geometry, positions=positions, seed=seed)
    assert result.num_evaluations == sum(model.rows_seen)
    assert max(model.rows_seen, default=0) <= 3  # bands with gaps may leave a square untouched
    assert result.position in positions
    assert_explained(result, model, image, clean, **geometry)
    again = run(model, image, label, clean, **geometry, positions=positions, seed=seed)
    assert torch.equal(again.x_adv, result.x_adv)
    # a patch that touches D votes closes a gap of 2 D at most (Levine & Feizi 2020, Theorem 1)
    counts = clean.bincount(minlength=3)
    rivals = torch.cat([counts[:label], counts[label + 1 :]])
    most = max(int(touched(left, **geometry).sum()) for _, left in positions)
    if int(counts[label] - rivals.max()) > 2 * most:
        assert result.prediction == label


def test_a_white_square_is_found_without_gradients():
    model, image = brightness_voter(2.5), torch.zeros(1, SIDE, SIDE)
    geometry = {"band": 4, "stride": 1, "patch": 3}  # touches 6 of 8 votes
    clean = recount(model, image, band=4, stride=1)
    assert winner(clean) == 0
    result = run(model, image, 0, clean, **geometry, positions=[(2, 3)], num_steps=0)
    assert result.prediction == 1
    assert (result.x_adv[:, 2:5, 3:6] == 1).all()
    assert result.num_evaluations == 12  # black and white, six touched ablations each
    assert_explained(result, model, image, clean, **geometry)


def test_gradients_find_what_constant_squares_cannot():
    model, image = checker_voter(1.5), torch.full((1, SIDE, SIDE), 0.5)
    geometry = {"band": 5, "stride": 1, "patch": 4}
    clean = recount(model, image, band=5, stride=1)
    assert (clean == 0).all()
    for value in (0.0, 1.0):
        constant = image.clone()
        constant[:, 2:6, 2:6] = value
        assert torch.equal(recount(model, constant, band=5, stride=1), clean)
    result = run(model, image, 0, clean, **geometry, positions=[(2, 2)], num_steps=12)
    assert result.prediction == 1
    assert_explained(result, model, image, clean, **geometry)


def test_no_success_returns_the_smallest_lead():
    """Each touched vote falls, but 3 of 8 are not enough: the label stands, with fewer votes."""
    model, image = brightness_voter(0.5), torch.zeros(1, SIDE, SIDE)
    geometry = {"band": 2, "stride": 1, "patch": 2}
    clean = recount(model, image, band=2, stride=1)
    result = run(model, image, 0, clean, **geometry, positions=[(0, 0), (3, 3)])
    assert result.prediction == 0
    assert int((recount(model, result.x_adv, band=2, stride=1) == 0).sum()) == 5
    assert_explained(result, model, image, clean, **geometry)


@pytest.mark.parametrize(("label", "broken"), [(0, False), (1, True)])
def test_a_tie_belongs_to_the_lower_class(label, broken):
    """Four of eight votes flipped: enough against class 1, not against class 0."""
    weight = torch.stack([torch.zeros(1, SIDE, SIDE), torch.ones(1, SIDE, SIDE)])
    weight = weight if label == 0 else weight.flip(0)
    bias = torch.tensor([0.5, 0.0]) if label == 0 else torch.tensor([0.0, 0.5])
    model, image = LinearVoter(weight, bias).eval(), torch.zeros(1, SIDE, SIDE)
    geometry = {"band": 3, "stride": 1, "patch": 2}
    clean = recount(model, image, band=3, stride=1)
    assert winner(clean) == label
    result = run(model, image, label, clean, **geometry, positions=[(1, 1)])
    assert (result.prediction != label) == broken


def test_an_image_that_is_wrong_already_comes_back_unchanged():
    model, image = brightness_voter(2.5), torch.zeros(1, SIDE, SIDE)
    clean = recount(model, image, band=4, stride=1)
    model.rows_seen.clear()
    result = run(model, image, 1, clean, band=4, stride=1, patch=3, positions=[(0, 0)])
    assert torch.equal(result.x_adv, image)
    assert (result.position, result.prediction, result.num_evaluations) == (None, 0, 0)
    assert model.rows_seen == []


def test_weights_get_no_gradients_and_keep_their_flags():
    model, image = checker_voter(1.5), torch.full((1, SIDE, SIDE), 0.5)
    model.train()
    clean = recount(model, image, band=5, stride=1)
    geometry = {"band": 5, "stride": 1, "patch": 4, "positions": [(2, 2)]}
    with pytest.raises(ValueError, match="attack_mode"):
        run(model, image, 0, clean, **geometry)
    with attack_mode(model):
        run(model, image, 0, clean, **geometry)
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_wrong_calls_are_refused():
    model, image = brightness_voter(2.5), torch.zeros(1, SIDE, SIDE)
    clean = recount(model, image, band=4, stride=1)
    for positions in ([], [(6, 0)], [(0, -1)]):
        with pytest.raises(ValueError, match=r"position|square"):
            run(model, image, 0, clean, band=4, stride=1, patch=3, positions=positions)
    with pytest.raises(ValueError, match="predictions"):
        run(model, image, 0, clean, band=4, stride=2, patch=3, positions=[(0, 0)])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_positions=st.integers(1, 30))
def test_ranking_puts_the_most_winning_votes_first(data, num_positions):
    band, stride, patch = (data.draw(st.integers(1, high)) for high in (SIDE, 5, SIDE))
    num_votes = len(range(0, SIDE, stride))
    label = st.integers(0, 2)
    votes = torch.tensor(data.draw(st.lists(label, min_size=num_votes, max_size=num_votes)))
    geometry = {"band": band, "stride": stride, "patch": patch}
    squares = rank_positions(
        votes,
        masks_of(band=band, stride=stride),
        winner=winner(votes),
        patch=patch,
        num_positions=num_positions,
    )
    assert 1 <= len(squares) <= num_positions
    assert len(set(squares)) == len(squares)
    assert all(0 <= corner <= SIDE - patch for square in squares for corner in square)
    for_winner = votes == winner(votes)
    score = [
        int((touched(left, **geometry) & for_winner).sum()) for left in range(SIDE - patch + 1)
    ]
    assert score[squares[0][1]] == max(score)


class OnDemand:
    """Masks made when they are asked for; remembers how many were held at once."""

    def __init__(self, ablations):
        self.ablations, self.most = ablations, 0

    def __len__(self):
        return len(self.ablations)

    def __getitem__(self, index):
        self.most = max(self.most, len(index))
        return self.ablations[index]


@pytest.mark.parametrize("kind", ["columns", "rows", "blocks", "both"])
@pytest.mark.parametrize("seed", range(4))
def test_masks_made_a_few_at_a_time_attack_alike(monkeypatch, kind, seed):
    """Bit for bit what an attack that holds all masks finds, without ever holding them."""
    ablations = Ablations(kind=kind, image_size=(SIDE, SIDE), band=3, stride=1)
    generator = torch.Generator().manual_seed(seed)
    model = LinearVoter(torch.randn(3, 2, SIDE, SIDE, generator=generator), torch.zeros(3)).eval()
    image = torch.rand(2, SIDE, SIDE, generator=generator)
    clean = torch.cat([model.forward_ablated(image[None], m[None]) for m in ablations.masks()])
    clean = clean.argmax(dim=1)

    def attacked(masks):
        label, sizes = winner(clean), {"patch": 2}
        squares = rank_positions(clean, masks, winner=label, num_positions=6, **sizes)
        steps = {"num_steps": 4, "step_size": 0.2, "positions": squares, "micro_batch": 3}
        draws = torch.Generator().manual_seed(seed)
        found = attack_vote(model, image, label, clean, masks, generator=draws, **sizes, **steps)
        return squares, found

    squares, found = attacked(ablations.masks())
    monkeypatch.setattr(masked_votes, "MASKS_AT_ONCE", 5)
    few = OnDemand(ablations)
    same_squares, same = attacked(few)
    assert few.most == 5 < len(ablations)
    assert same_squares == squares
    assert torch.equal(same.x_adv, found.x_adv)
    assert (same.position, same.prediction) == (found.position, found.prediction)
    assert same.num_evaluations == found.num_evaluations
