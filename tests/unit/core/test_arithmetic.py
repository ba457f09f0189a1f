"""TF32 and cuDNN switches: both interfaces of torch agree, and a caller's own come back."""

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.backends import cuda, cudnn, mkldnn

from components.certify.tasks import VoteSettings
from components.core import arithmetic
from components.core.arithmetic import EXACT, TRAINING, Arithmetic, in_use, use, using


@pytest.fixture(autouse=True)
def _as_before():
    with using(in_use()):
        yield


@pytest.mark.parametrize("switches", product((False, True), repeat=4))
def test_both_interfaces_agree_on_every_setting(switches):
    chosen = Arithmetic(**dict(zip(EXACT.to_dict(), switches, strict=True)))
    use(chosen)
    assert in_use() == chosen
    assert (cuda.matmul.allow_tf32, cudnn.allow_tf32) == switches[:2]  # raises where they disagree
    assert torch.get_float32_matmul_precision() == ("high" if switches[0] else "highest")
    assert {part.fp32_precision for part in arithmetic.ON_CPU} == {"ieee"}


def test_training_computes_as_torch_starts():
    code = "from components.core.arithmetic import TRAINING, in_use; assert in_use() == TRAINING"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert TRAINING.tf32_conv
    assert not TRAINING.tf32_matmul


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_switches_of_a_caller_come_back(precision):
    torch.set_float32_matmul_precision(precision)
    before, on_cpu = in_use(), mkldnn.matmul.fp32_precision
    with using(EXACT):
        assert in_use() == EXACT
        assert mkldnn.matmul.fp32_precision == "ieee"
    assert (in_use(), mkldnn.matmul.fp32_precision) == (before, on_cpu)
    assert torch.get_float32_matmul_precision() == precision


def test_a_caller_who_mixed_both_interfaces_is_no_obstacle():
    cudnn.allow_tf32 = False
    cudnn.conv.fp32_precision = "tf32"
    with using(EXACT):
        assert not cudnn.allow_tf32
    assert in_use().tf32_conv


def test_votes_record_the_switches_wherever_they_matter():
    settings = VoteSettings(kind="gaussian", micro_batch=5, device="cpu")
    assert settings.to_dict() == {"micro_batch": 5, "device": "cpu"}
    recorded = replace(settings, device="cuda").to_dict()["float32"]
    assert Arithmetic.read(recorded) == EXACT


@pytest.mark.parametrize(
    "record", [None, {}, {**EXACT.to_dict(), "new": True}, {**EXACT.to_dict(), "tf32_conv": 1}]
)
def test_a_record_of_another_version_is_refused(record):
    with pytest.raises(ValueError, match=r"switches|neither"):
        Arithmetic.read(record)
