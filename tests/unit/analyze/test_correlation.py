"""Correlation of blocks against numpy: modes, streams, merged states, refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from components.analyze.blocks import find_blocks
from components.analyze.correlation import (
    PooledPearson,
    SamplePearson,
    matrix_measurements,
    pearson_states,
    read_state,
)
from components.analyze.settings import BlockSettings, CorrelationSettings
from components.analyze.states import merge_all, read_arrays, to_table
from components.attacks.gradients import attack_mode
from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.models.attention.features import block_outputs
from components.models.pixels import PixelModel
from tests.unit.networks import SMALL_SPEC, scattered

MODES = ["flat", "per_sample", "per_feature"]


def recorded(net, x, how=None):
    """Outputs of all blocks as float64 numpy arrays, by an independent hook."""
    blocks = find_blocks(net, how)
    with torch.no_grad(), block_outputs(net, blocks.sites) as outputs:
        net(x)
    return [value.numpy().astype(np.float64) for value in outputs.values()]


def oracle(values, mode):
    """numpy's corrcoef: of everything, of every image, of every channel."""
    stack = np.stack(values)  # (L, N, T, D)
    if mode == "flat":
        return np.abs(np.corrcoef(stack.reshape(len(stack), -1)))
    axis = {"per_sample": 1, "per_feature": 3}[mode]
    parts = [
        np.abs(np.corrcoef(np.take(stack, i, axis=axis).reshape(len(stack), -1)))
        for i in range(stack.shape[axis])
    ]
    return np.mean(parts, axis=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["vit", "deit", "beit"])
def test_both_streams_equal_numpy(new_net, x, name, mode):
    net = new_net(name)
    states = pearson_states(net, find_blocks(net), x, CorrelationSettings(mode=mode))
    values = recorded(net, x)
    expected = {"all": values, "cls": [value[:, :1] for value in values]}
    assert set(states) == set(expected)
    for stream, state in states.items():
        matrix = state.matrix()
        np.testing.assert_allclose(matrix, oracle(expected[stream], mode), atol=1e-12)
        assert (np.diagonal(matrix) == 1).all()
        np.testing.assert_array_equal(matrix, matrix.T)
        assert ((matrix >= 0) & (matrix <= 1)).all()
    assert not np.allclose(states["all"].matrix(), states["cls"].matrix(), atol=0.01)


@pytest.mark.parametrize("name", ["cait", "xcit"])
def test_two_part_networks_have_two_matrices(new_net, x, name):
    net = new_net(name)
    states = pearson_states(net, find_blocks(net), x, CorrelationSettings())
    values = recorded(net, x)
    np.testing.assert_allclose(states["all"].matrix(), oracle(values[:4], "flat"), atol=1e-12)
    cls = [value[:, :1] for value in values[4:]]
    np.testing.assert_allclose(states["cls"].matrix(), oracle(cls, "flat"), atol=1e-12)


def test_a_user_network_has_the_streams_of_its_blocks(new_net, x):
    net, how = new_net("users"), BlockSettings(names=("layers.*",), num_prefix_tokens=1)
    states = pearson_states(net, find_blocks(net, how), x, CorrelationSettings())
    values = recorded(net, x, how)
    np.testing.assert_allclose(states["all"].matrix(), oracle(values, "flat"), atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_streamed_states_equal_one_shot_for_any_cut(new_net, x, mode):
    net, how = new_net("vit"), CorrelationSettings(mode=mode)
    blocks = find_blocks(net)
    whole = pearson_states(net, blocks, x, how)["all"].matrix()
    for size in (1, 2, 4):
        parts = [pearson_states(net, blocks, part, how)["all"] for part in torch.split(x, size)]
        np.testing.assert_allclose(merge_all(parts).matrix(), whole, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_units_merged_in_order_have_the_same_bytes_whoever_computed_them(new_net, x, mode):
    net, how = new_net("vit"), CorrelationSettings(mode=mode)
    blocks = find_blocks(net)

    def unit(place):
        states = pearson_states(net, blocks, x[2 * place : 2 * place + 2], how)
        return read_arrays(to_table(states))["all"]

    def bytes_of(units):
        whole = merge_all([read_state(units[place]) for place in sorted(units)])
        return {name: value.tobytes() for name, value in whole.arrays().items()}

    forwards = bytes_of({place: unit(place) for place in (0, 1, 2)})
    assert bytes_of({place: unit(place) for place in (2, 0, 1)}) == forwards


def test_a_large_mean_costs_no_digits():
    values = np.random.default_rng(0).normal(size=(3, 400))
    values[1] += 0.5 * values[0]
    parts = [torch.from_numpy(part + 1e7)[None] for part in np.split(values, 8, axis=1)]
    found = merge_all([PooledPearson.of(part) for part in parts]).matrix()
    np.testing.assert_allclose(found, np.abs(np.corrcoef(values)), atol=1e-7)


def test_constant_blocks_have_no_correlation():
    values = torch.randn(3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values[1] = 2.5
    for state in (PooledPearson.of(values[None]), SamplePearson.of(values)):
        matrix = state.matrix()
        assert np.isnan(matrix[1]).all()
        assert np.isnan(matrix[:, 1]).all()
        assert matrix[0, 0] == 1
        assert matrix[0, 2] < 1
        rows = matrix_measurements(matrix, stream="all", metric="pearson_flat", num_items=9)
        assert [row.item for row in rows] == [
            "all/0-0", "all/0-1", "all/0-2", "all/1-1", "all/1-2", "all/2-2",
        ]  # fmt: skip
        assert [row.value is None for row in rows] == [False, True, False, True, True, False]
        assert rows[2].value == matrix[0, 2]
    varied = SamplePearson.of(torch.roll(values, 1, 1) + torch.rand(3, 50, dtype=torch.float64))
    mixed = merge_all([SamplePearson.of(values), varied])
    assert mixed.num[0, 1] == 1  # images in which a block is constant do not count
    assert mixed.num[0, 2] == 2


def test_what_does_not_fit_is_refused_by_name(new_net, x):
    net = new_net("swin")
    with pytest.raises(CasemateError, match=r"pearson does not fit: layers.1.blocks.0 .* use cka"):
        pearson_states(net, find_blocks(net), x, CorrelationSettings())
    gap = new_net("gap")
    with pytest.raises(CasemateError, match="cls does not exist in VisionTransformer"):
        pearson_states(gap, find_blocks(gap), x, CorrelationSettings(tokens=("cls",)))
    half = new_net("vit").bfloat16()
    with pytest.raises(CasemateError, match=r"torch.bfloat16; run the network in float32"):
        pearson_states(half, find_blocks(half), x.bfloat16(), CorrelationSettings())
    users = new_net("users")
    named = find_blocks(users, BlockSettings(names=("embed",), num_prefix_tokens=1))
    with pytest.raises(CasemateError, match=r"needs tokens \(B, N, C\); embed returns"):
        pearson_states(users, named, x, CorrelationSettings(tokens=("cls",)))
    with pytest.raises(CasemateError, match=r"mode: per_feature needs tokens"):
        pearson_states(users, named, x, CorrelationSettings(tokens=("all",), mode="per_feature"))
    with pytest.raises(SettingError, match="mode: per_sample would be ignored: measure is cka"):
        CorrelationSettings(measure="cka", mode="per_sample")
    with pytest.raises(SettingError, match="estimator: exact would be ignored"):
        CorrelationSettings(measure="pearson", estimator="exact")


def test_a_model_of_pixels_is_analysed_through_its_network(x):
    """Up-sampling and normalisation are part of the pass, blocks those of the inner network."""
    spec = replace(SMALL_SPEC, upsample=32, options={**SMALL_SPEC.options, "patch_size": 8})
    model = scattered(lambda: PixelModel(spec), by=0.1)
    with attack_mode(model):
        found = pearson_states(model, find_blocks(model.net), x, CorrelationSettings())
        values = recorded(model.net, model.network_input(x))
    np.testing.assert_allclose(found["all"].matrix(), oracle(values, "flat"), atol=1e-12)
