"""User code in the gate: what is built from it is tried before anything starts."""

import pytest

from pipelines.recipe.check import check
from pipelines.recipe.facts import Facts
from pipelines.recipe.load import loads
from tests.refusals import refusal_of

CODE = """
from dataclasses import dataclass

import torch
from torch import nn

from components.train.objectives.base import Objective


class Head(nn.Module):
    def __init__(self, classes, pixels, *, then=None):
        super().__init__()
        self.linear, self.then = nn.Linear(pixels, classes), then

    def forward(self, x):
        out = self.linear(x.flatten(1))
        return self.then(self, out) if self.then else out


def good(*, num_classes, channels, image_size):
    [rate.item() for rate in torch.linspace(0, 0.1, 3)]  # needs values, not only shapes
    return Head(num_classes, channels * image_size**2)


def more_logits(*, num_classes, channels, image_size):
    return Head(num_classes + 1, channels * image_size**2)


def fixed_side(*, num_classes, channels, image_size):
    return Head(num_classes, channels * 28 * 28)


def images_out(*, num_classes, channels, image_size):
    return nn.Conv2d(channels, num_classes, 1)


def no_parameters(*, num_classes, channels, image_size):
    return nn.Flatten()


def raises(*, num_classes, channels, image_size):
    raise RuntimeError("no\\nway")


def number(*, num_classes, channels, image_size):
    return 3


def not_finite(*, num_classes, channels, image_size):
    return Head(num_classes, channels * image_size**2, then=lambda self, out: out / 0 - out / 0)


def softmaxed(*, num_classes, channels, image_size):
    return Head(num_classes, channels * image_size**2, then=lambda self, out: out.softmax(1))


def pair_in_training(*, num_classes, channels, image_size):
    def then(self, out):
        return (out, out) if self.training else out

    return Head(num_classes, channels * image_size**2, then=then)


def gpu_only(*, num_classes, channels, image_size):
    def then(self, out):
        raise RuntimeError("No CUDA GPUs are available")

    return Head(num_classes, channels * image_size**2, then=then)


class Own:
    @dataclass(frozen=True)
    class Settings:
        pass


class NoName(Own):
    def __init__(self, settings, *, norm, eps):
        pass

    def __call__(self, logits_of, items):
        pass


class NoArguments(Own):
    def __init__(self):
        self.name = "x"


class NoLoss(Own):
    def __init__(self, settings, *, label_smoothing):
        pass


class Abstract(Objective, Own):
    def __init__(self, settings, *, label_smoothing):
        pass


class NoDecode:
    classes = ("a", "b")

    def entries(self):
        return []


class Gone:
    def __init__(self, path=None):
        raise OSError("disk\\ngone")
"""
BASE = """
name: x
data: {source: digits, image_size: 8}
model: {architecture: "python:tried_code.py:good"}
train: {}
attack: {linf: {eps: 0.1, attacks: [{kind: pgd}]}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CASEMATE_USER_CODE", str(tmp_path / "cache"))
    (tmp_path / "tried_code.py").write_text(CODE)
    return tmp_path


def refusal(folder, *overrides, facts=None):
    recipe = loads(BASE, source="my.yaml", overrides=overrides, base=folder)
    return refusal_of(check, recipe, facts)


def test_a_network_that_needs_values_passes(folder):
    check(loads(BASE, source="my.yaml", base=folder))
    check(loads(BASE, source="my.yaml", overrides=["cluster.strategy=fsdp"], base=folder))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("more_logits", "returns (2, 11) for 2 images of 10 classes; logits are (2, 10)"),
        ("fixed_side", "fails on 2 images of 1x8x8: RuntimeError: mat1 and mat2 shapes"),
        ("images_out", "returns (2, 10, 8, 8) for 2 images"),
        ("no_parameters", "has no parameters to train"),
        ("raises", "fails to build: RuntimeError: no way"),
        ("number", "returns a int, not an nn.Module"),
        ("not_finite", "returns logits that are not finite for black images"),
        ("softmaxed", "returns probabilities, attacks need logits; leave out the softmax"),
        ("pair_in_training", "returns a tuple for 2 images"),
    ],
)
def test_networks_run_once_before_anything_starts(folder, name, text):
    line = refusal(folder, f"model.architecture=python:tried_code.py:{name}")
    assert line.startswith("my.yaml: model.architecture: python:tried_code.py@")
    assert f":{name} {text}" in line


def test_networks_are_refused_at_the_key_of_their_variant(folder):
    variant = "{objective: {kind: standard}, model: {architecture: python:tried_code.py:number}}"
    line = refusal(folder, f"train.variants={{other: {variant}}}")
    assert line.startswith("my.yaml: train.variants.other.model.architecture: python:tried_code")


def test_a_network_for_gpus_is_not_refused_here(folder, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    own = ["model.architecture=python:tried_code.py:gpu_only"]
    check(loads(BASE, source="my.yaml", overrides=own, base=folder))


def test_unknown_sizes_are_tried_on_the_prepared_images(folder):
    overrides = ["data={source: npz, path: x.npz}"]
    overrides += ["model.architecture=python:tried_code.py:more_logits"]
    check(loads(BASE, source="my.yaml", overrides=overrides, base=folder))
    prepared = Facts(height=8, width=8, channels=1, num_classes=4)
    assert "(2, 5)" in refusal(folder, *overrides, facts=prepared)


def test_timm_has_no_weights_for_own_code(folder):
    line = refusal(folder, "data={source: npz, path: x.npz}", "model.pretrained=timm")
    assert line.startswith("my.yaml: model.pretrained: timm has no weights for python:tried_code")


@pytest.mark.parametrize(
    ("override", "key", "text"),
    [
        ("attack.linf.attacks=[{kind: pgd}, {kind: NoName}]", "attack.linf.attacks.1.kind", "name"),
        ("attack.linf.attacks=[{kind: NoArguments}]", "attack.linf.attacks.0.kind", "to start"),
        ("train.objective={kind: NoLoss}", "train.objective.kind", "it lacks loss"),
        ("train.objective={kind: Abstract}", "train.objective.kind", "it lacks loss"),
        ("data={source: NoDecode}", "data.source", "is not a source: it lacks decode"),
        ("data={source: Gone}", "data.source", "fails to open: OSError: disk gone"),
        ("data={source: Gone, path: .}", "data.source", "fails to open: OSError: disk gone"),
        ("data.synthetic={source: NoDecode}", "data.synthetic.source", "it lacks decode"),
    ],
)
def test_attacks_objectives_and_sources_are_constructed(folder, override, key, text):
    for name in ("NoName", "NoArguments", "NoLoss", "Abstract", "NoDecode", "Gone"):
        override = override.replace(f": {name}", f": python:tried_code.py:{name}")
    line = refusal(folder, override)
    assert line.startswith(f"my.yaml: {key}: python:tried_code.py@"), line
    assert text in line


def test_files_of_other_machines_are_not_asked_for(folder):
    source = "data={source: python:tried_code.py:Gone, path: /nowhere/at/all}"
    check(loads(BASE, source="my.yaml", overrides=[source], base=folder))
