"""Sweeps in recipes: which certificates they make, who votes for whom, and what is refused."""

from pathlib import Path

import pytest

from components.core.errors import CasemateError
from pipelines.flow.plan import plan
from pipelines.recipe.costs import Hardware, Question, rows_of
from pipelines.recipe.lint import warnings_of
from pipelines.recipe.load import loads, parse, with_values
from pipelines.stages.certify.cost import costs_of
from tests.refusals import refusal_of

RECIPE = """
name: swept
data: {source: digits, image_size: 8}
model: {token_policy: drop, options: {patch_size: 4, embed_dim: 32, depth: 2, num_heads: 2}}
train: {objective: {kind: columns, band: 2}}
certify:
  p: {kind: columns, patch_sizes: [1], sweep: {band: [3, 2], stride: [4, 1, 2, 3]}}
"""


def swept(**changes):
    recipe = loads(RECIPE, source="swept")
    return with_values(recipe, {f"certify.p.{key}": value for key, value in changes.items()})


def finer(recipe):
    return {name: entry.finer for name, entry in recipe.certificates().items()}


def test_every_pair_is_a_certificate_and_coarse_strides_take_finer_votes():
    certificates = swept().certificates()
    assert list(certificates)[:4] == ["p-b2-s1", "p-b2-s2", "p-b2-s3", "p-b2-s4"]
    for name, entry in certificates.items():
        band, stride = name.removeprefix("p-b").split("-s")
        assert (entry.section.band, entry.section.stride) == (int(band), int(stride))
        assert entry.section.sweep is None
        assert entry.section.patch_sizes == (1,)
        assert entry.finer == (None if stride == "1" else f"p-b{band}-s1")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sweep": {"stride": [2, 3, 4, 6, 8]}},
         {"p-s2": None, "p-s3": None, "p-s4": "p-s2", "p-s6": "p-s2", "p-s8": "p-s2"}),
        ({"sweep": {"band": [1, 4]}}, {"p-b1": None, "p-b4": None}),
        ({"sweep": {"band": [1, 4]}, "stride": 2}, {"p-b1": None, "p-b4": None}),
        ({"sweep": {"stride": [1, 2]}, "stop_early": True}, {"p-s1": None, "p-s2": None}),
        ({"sweep": None}, {"p": None}),
    ],
)  # fmt: skip
def test_who_votes_for_whom(changes, expected):
    recipe = swept(**changes)
    assert finer(recipe) == expected
    assert all(
        e.section.stride >= recipe.certify["p"].stride for e in recipe.certificates().values()
    )


def test_steps_wait_for_the_votes_they_take_and_each_has_its_own_folder():
    planned = {s.name: s for s in plan(swept(), Path("runs"))}
    assert planned["certify.p-b3-s4"].step.needs == ("prepare", "train.main", "certify.p-b3-s1")
    names = [name for name in planned if name.startswith("certify.")]
    assert len({planned[name].fingerprint for name in names}) == 8
    for name in names:
        for need in planned[name].step.needs:
            assert list(planned).index(need) < list(planned).index(name)
    # a further stride leaves the others as they were
    wider = {s.name: s for s in plan(swept(**{"sweep.stride": [1, 2, 3, 4, 8]}), Path("runs"))}
    assert all(wider[name].fingerprint == planned[name].fingerprint for name in names)


def test_a_section_without_a_sweep_keeps_its_fingerprint():
    recipe = swept(sweep=None)
    (step,) = [s for s in plan(recipe, Path("runs")) if s.name == "certify.p"]
    assert "sweep" not in step.step.identity["certify"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sweep": {}}, "sweep: list values of band, of stride, or of both"),
        ({"sweep": {"stride": [1, 0]}}, "certify.p.sweep.stride.1: 0"),
        ({"sweep": {"band": [2, 2]}}, "sweep.band: [2, 2] lists a value twice"),
        ({"band": 2}, "band: 2 would be ignored, because sweep.band lists values"),
        ({"stride": 2}, "stride: 2 would be ignored"),
        ({"sweep": {"width": [2]}}, "certify.p.sweep.width: [2] is unknown"),
    ],
)
def test_sweeps_that_mean_nothing_are_refused_in_one_line(changes, said):
    assert said in refusal_of(swept, **changes)


def test_two_certificates_of_one_name_are_refused():
    values = swept().resolved()
    values["certify"]["p-b2-s1"] = {"kind": "rows", "patch_sizes": [1], "band": 2}
    with pytest.raises(CasemateError, match="two sections make a certificate called p-b2-s1"):
        parse(values, source="swept")


def test_other_widths_are_meant_and_strides_are_warned_of_by_name():
    found = [(warning.key, warning.message.split(":")[0]) for warning in warnings_of(swept())]
    assert found == [("certify.p.sweep.stride", "3 does not divide 8")]


def test_only_entries_that_vote_are_priced():
    hardware = Hardware(accelerators=["A100"], dtype="fp32", num_workers=1)
    rows = rows_of(costs_of(swept(), Question(num_items=10)), hardware)
    assert [(row["step"], row["passes"]) for row in rows] == [
        ("certify.p-b2-s1", 80),
        ("certify.p-b3-s1", 80),
    ]


def test_smoke_keeps_a_small_sweep():
    recipe = loads(RECIPE, source="swept", smoke=True)
    assert finer(recipe) == {
        "p-b2-s1": None,
        "p-b2-s4": "p-b2-s1",
        "p-b3-s1": None,
        "p-b3-s4": "p-b3-s1",
    }
