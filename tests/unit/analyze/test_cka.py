"""Linear CKA: feature form, Gram form, invariances; the minibatch estimator against exact."""

from itertools import combinations

import numpy as np
import pytest
import torch

from components.analyze.blocks import find_blocks
from components.analyze.cka import (
    MinibatchCka,
    cka_states,
    estimator_of,
    even_batches,
    exact_cka,
    exact_matrices,
    gram,
    unbiased_hsic,
)
from components.analyze.correlation import pearson_states
from components.analyze.settings import BlockSettings, CorrelationSettings
from components.analyze.states import merge_all, read_arrays, to_table
from components.core.errors import CasemateError
from components.models.attention.features import block_outputs

HOW = CorrelationSettings(measure="cka")


def features(n, widths=(7, 5, 11), seed=0):
    """Related random features of several widths; the last one is unrelated."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(n, 4))
    found = [shared @ rng.normal(size=(4, w)) + 0.7 * rng.normal(size=(n, w)) for w in widths]
    return [*found, rng.normal(size=(n, 6))]


def grams(values):
    return torch.stack([gram(torch.from_numpy(value)) for value in values])


def feature_form(one, other):
    """|Y'X|^2 / (|X'X| |Y'Y|) with centred columns (Kornblith et al. 2019, sec. 3)."""
    a, b = one - one.mean(axis=0), other - other.mean(axis=0)
    norm = np.linalg.norm
    return norm(b.T @ a) ** 2 / (norm(a.T @ a) * norm(b.T @ b))


def u_statistic(k, m):
    """HSIC_1 as its definition: a mean over all ordered quadruples of different items."""
    total, count = 0.0, 0
    n = len(k)
    for i in range(n):
        for j in range(n):
            for q in range(n):
                for r in range(n):
                    if len({i, j, q, r}) == 4:
                        total += k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q])
                        count += 1
    return total / count


def test_exact_equals_the_feature_form():
    values = features(30)
    found = exact_cka(grams(values))
    for a, b in combinations(range(len(values)), 2):
        assert found[a, b] == pytest.approx(feature_form(values[a], values[b]), abs=1e-14)
    plain = torch.stack([torch.from_numpy(v @ v.T) for v in values])  # around 0, not their mean
    np.testing.assert_allclose(exact_cka(plain), found, atol=1e-12)
    assert (np.diagonal(found) == 1).all()
    np.testing.assert_allclose(found, found.T, atol=1e-15)


def test_cka_ignores_rotation_scale_and_shift():
    values = features(25)
    rotation = np.linalg.qr(np.random.default_rng(5).normal(size=(7, 7)))[0]
    moved = [3.5 * values[0] @ rotation + 20, *values[1:]]
    np.testing.assert_allclose(exact_cka(grams(moved)), exact_cka(grams(values)), atol=1e-12)
    first, second = (MinibatchCka.of(grams(v)).matrix() for v in (values, moved))
    np.testing.assert_allclose(first, second, atol=1e-12)


def test_the_unbiased_form_is_the_u_statistic():
    values = features(6, widths=(3, 4))
    found = unbiased_hsic(grams(values)).numpy()
    plain = [v @ v.T for v in values]  # not centred: the statistic ignores the mean
    for a in range(len(values)):
        for b in range(len(values)):
            assert found[a, b] == pytest.approx(u_statistic(plain[a], plain[b]), rel=1e-10)


def test_minibatches_estimate_the_value_of_many_images():
    """Exact CKA of the unrelated features falls like 1/n; minibatches of 32 have no such bias."""
    values = features(2048)
    whole = exact_cka(grams(values))
    batches = [[value[i : i + 32] for value in values] for i in range(0, 2048, 32)]
    streamed = merge_all([MinibatchCka.of(grams(batch)) for batch in batches]).matrix()
    np.testing.assert_allclose(streamed, whole, atol=0.03)
    biased = np.mean([exact_cka(grams(batch)) for batch in batches], axis=0)
    assert abs(streamed[0, 3]) < 0.02 < 0.1 < biased[0, 3]


@pytest.mark.parametrize("name", ["swin", "resnet", "resnetv2", "levit", "vit"])
def test_networks_of_shrinking_maps(new_net, name):
    x = torch.rand(12, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    x = x if name in ("resnet", "resnetv2", "levit") else x[..., :16, :16]
    net = new_net(name)
    blocks = find_blocks(net)
    found = exact_matrices(net, blocks, x, HOW)["all"]
    with torch.no_grad(), block_outputs(net, blocks.sites) as outputs:
        net(x)
    values = [value.flatten(1).double().numpy() for value in outputs.values()]
    for a, b in combinations(range(len(values)), 2):
        assert found[a, b] == pytest.approx(feature_form(values[a], values[b]), abs=1e-12)
    assert ((found >= 0) & (found <= 1)).all()
    state = cka_states(net, blocks, x, HOW)["all"]
    again = MinibatchCka.of_arrays(read_arrays(to_table({"all": state}))["all"])
    assert again.matrix().tobytes() == state.matrix().tobytes()
    assert not any(part._forward_hooks for part in net.modules())


def test_batches_are_even_and_the_estimator_follows_their_number():
    ids = [f"i{place}" for place in range(1000)]
    how = CorrelationSettings(cka_batch=256)
    assert estimator_of(how, num_items=256) == "exact"
    assert estimator_of(how, num_items=257) == "minibatch"
    batches = even_batches(ids, how)
    assert [len(batch) for batch in batches] == [250] * 4
    assert [item for batch in batches for item in batch] == ids
    assert [len(b) for b in even_batches(ids[:9], CorrelationSettings(cka_batch=4))] == [4, 5]
    chosen = CorrelationSettings(estimator="exact", cka_batch=4)
    assert len(even_batches(ids[:9], chosen)) == 1
    with pytest.raises(CasemateError, match=r"subset.num_items: 3 is too small for CKA"):
        even_batches(ids[:3], how)


def test_constant_outputs_have_no_cka():
    values = features(10)
    values[1][:] = 3.0
    for found in (exact_cka(grams(values)), MinibatchCka.of(grams(values)).matrix()):
        assert np.isnan(found[1]).all()
        assert found[0, 0] == 1
    with pytest.raises(CasemateError, match="must return one float32 tensor"):
        gram(torch.zeros(4, 3, dtype=torch.float16))


def test_named_blocks_that_do_not_run_once_in_their_order_are_refused(new_net, x):
    net = new_net("users")
    net.layers[1].extra = torch.nn.Linear(2, 2)
    for names in (("layers.2", "layers.0"), ("layers.0", "layers.1.extra")):
        blocks = find_blocks(net, BlockSettings(names=names))
        for study in (exact_matrices, pearson_states):
            with pytest.raises(CasemateError, match="do not run once each in this order, but: "):
                study(net, blocks, x, CorrelationSettings())
    several = find_blocks(net, BlockSettings(names=("layers.0.self_attn",)))
    net.layers[0].train()  # its fused path in eval mode does not call its parts
    with pytest.raises(CasemateError, match=r"layers.0.self_attn returns a tuple"):
        pearson_states(net, several, x, CorrelationSettings())
    net.train()
    with pytest.raises(ValueError, match="hold attack_mode"):
        exact_matrices(net, find_blocks(net, BlockSettings(names=("layers.0",))), x, HOW)
