"""The policy of precisions: what `auto` chooses, what is refused, and what reduces numbers."""

import pytest
import torch

from components.core.arithmetic import EXACT
from components.core.errors import CasemateError
from components.core.precision import (
    check_precision,
    is_fast,
    reduced,
    resolve_precision,
    switches_of,
)


def on_gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def with_units(monkeypatch, found):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: found)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.mark.parametrize("asked", ["float32", "tf32", "bfloat16"])
def test_a_named_precision_stays(asked):
    assert resolve_precision(asked, "cpu", fastest=("bfloat16",)) == asked


@pytest.mark.parametrize(
    ("capability", "fastest", "expected"),
    [
        ((8, 0), ("bfloat16", "tf32"), "bfloat16"),
        ((9, 0), ("tf32",), "tf32"),
        ((7, 5), ("bfloat16", "tf32"), "float32"),
        ((8, 6), (), "float32"),
    ],
)
def test_auto_is_the_first_that_the_gpu_has_units_for(monkeypatch, capability, fastest, expected):
    on_gpu(monkeypatch, capability)
    assert resolve_precision("auto", "cuda", fastest=fastest) == expected


def test_auto_is_float32_on_every_cpu(monkeypatch):
    with_units(monkeypatch, True)
    assert resolve_precision("auto", "cpu", fastest=("bfloat16", "tf32")) == "float32"


@pytest.mark.parametrize(("units", "fast"), [(True, ["bfloat16"]), (False, [])])
def test_what_a_processor_computes_without_emulation(monkeypatch, units, fast):
    with_units(monkeypatch, units)
    found = [name for name in ("tf32", "bfloat16", "float16") if is_fast(name, "cpu")]
    assert found == fast
    check_precision("float32", "cpu", key="precision")
    with pytest.raises(CasemateError, match=r"train\.precision: tf32 .*this processor"):
        check_precision("tf32", "cpu", key="train.precision")


def test_an_older_gpu_refuses_what_it_lacks(monkeypatch):
    on_gpu(monkeypatch, (7, 0))
    check_precision("float16", "cuda", key="precision")
    with pytest.raises(CasemateError, match="this GPU; use float32"):
        check_precision("bfloat16", "cuda", key="precision")


def test_only_tf32_moves_switches():
    assert switches_of("float32", EXACT) == switches_of("bfloat16", EXACT) == EXACT
    moved = switches_of("tf32", EXACT)
    assert moved.tf32_matmul
    assert moved.tf32_conv
    assert moved.cudnn_deterministic == EXACT.cudnn_deterministic


def test_products_are_reduced_inside_the_context_alone():
    a = torch.full((2, 2), 1 + 2.0**-12)
    with reduced("bfloat16", "cpu"):
        assert (a @ a).dtype == torch.bfloat16
        with reduced("float32", "cpu"):  # also where a caller reduces
            assert (a @ a).dtype == torch.float32
    assert (a @ a).dtype == torch.float32
