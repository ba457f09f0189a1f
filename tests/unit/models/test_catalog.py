"""The catalogue against the figures that the papers print, and against the networks themselves."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from components.core.errors import CasemateError
from components.models import catalog
from components.models.catalog import CATALOG, PAPERS, Architecture, family_of
from components.models.zoo import build_network
from pipelines.cli.models import commands

# Family: whether it drops tokens, whether its attention can be scaled.
ALLOWED = {
    "vit": (True, True),
    "beit": (True, True),
    "cait": (False, True),
    "xcit": (False, True),
    "swin": (False, True),
    "levit": (False, True),
    "resnet": (False, False),
    "convnext": (False, False),
}


def name_of(entry: Architecture) -> str:
    return entry.name


def network(entry: Architecture) -> nn.Module:
    with torch.device("meta"):
        return build_network(
            entry.name,
            image_size=entry.image_size,
            channels=3,
            num_classes=entry.num_classes,
            options={},
        )


def millions(name: str) -> float:
    return sum(p.numel() for p in network(CATALOG[name]).parameters()) / 1e6


@pytest.mark.parametrize("entry", [e for e in CATALOG.values() if e.printed_params], ids=name_of)
def test_counts_are_the_printed_ones(entry):
    """Papers round (26M for 25.56M) or cut off (25M for the same): one last digit at most."""
    printed = entry.printed_params
    last_digit = 10.0 ** -len(printed.partition(".")[2])
    assert abs(millions(entry.name) - float(printed)) < last_digit


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deit_small_patch16_224", 22.05),
        ("cait_s12_224", 25.61),
        ("xcit_nano_12_p16_224", 3.05),
        ("xcit_small_12_p16_224", 26.25),
        ("xcit_medium_12_p16_224", 46.40),
        ("xcit_large_12_p16_224", 103.79),
        ("wrn_28_10", 36.48),  # Zagoruyko & Komodakis print 36.5M
        ("preact_resnet18", 11.17),
    ],
)
def test_counts_to_two_decimals(name, expected):
    assert round(millions(name), 2) == expected


@pytest.mark.parametrize("entry", [e for e in CATALOG.values() if e.printed_gflops], ids=name_of)
def test_gflops_are_the_printed_ones(entry):
    """Some tools count normalisation and bias too: ours stay below by less than 1 %."""
    found = catalog.describe(entry)["flops"] / 1e9
    assert 0.99 < found / float(entry.printed_gflops) <= 1


def test_papers_and_families_are_named():
    assert {paper for entry in CATALOG.values() for paper in entry.papers} == set(PAPERS)
    assert {entry.family for entry in CATALOG.values()} == set(ALLOWED)


@pytest.mark.parametrize("family", sorted(ALLOWED))
def test_networks_allow_what_their_family_is_known_for(family):
    entry = [e for e in CATALOG.values() if e.family == family][-1]
    row = catalog.describe(entry)
    assert (row["drops_tokens"], row["scales_attention"]) == ALLOWED[family]


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("vit_small_patch14_dinov2", (True, True)),
        ("vit_small_r26_s32_224", (False, True)),  # its stem shows tokens their neighbours' pixels
        ("mobilevit_s", (False, False)),
    ],
)
def test_networks_outside_the_catalogue_are_asked_too(name, allowed):
    [entry] = catalog.find(name)
    row = catalog.describe(entry)
    assert (row["drops_tokens"], row["scales_attention"]) == allowed


def test_globs_search_the_catalogue_and_what_it_lacks_in_timm():
    assert [e.name for e in catalog.find("xcit_large_12_*")] == [
        "xcit_large_12_p16_224",
        "xcit_large_12_p8_224",
    ]
    assert catalog.find("*") == list(CATALOG.values())
    [outside] = catalog.find("vit_base_patch16_384")
    assert (outside.family, outside.image_size) == ("vision_transformer", 384)
    [tagged] = catalog.find("vit_base_patch16_384.augreg_in1k")
    assert tagged.image_size == 384
    assert [e.name for e in catalog.find("levit_conv_128*")] == [
        "levit_conv_128",
        "levit_conv_128s",
    ]
    with pytest.raises(CasemateError, match="models: vit_bas matches no name, here or in timm"):
        catalog.find("vit_bas")


def test_searching_everywhere_finds_every_name_once():
    names = [e.name for e in catalog.find_everywhere("*resnet18")]
    assert names[:2] == ["resnet18", "preact_resnet18"]
    assert "gluon_resnet18" not in names
    assert len(names) == len(set(names)) > 2
    with pytest.raises(CasemateError, match="matches no name"):
        catalog.find_everywhere("resnet-18")


def test_the_command_prints_integers_as_json():
    result = CliRunner().invoke(commands, ["tiny_*", "--json"], catch_exceptions=False)
    rows = json.loads(result.stdout)
    assert [row["name"] for row in rows] == ["tiny_vit", "tiny_xcit"]
    for row in rows:
        assert {type(row[k]) for k in ("params", "flops", "image_size", "activation_bytes")} == {
            int
        }
    assert (rows[0]["drops_tokens"], rows[1]["drops_tokens"]) == (True, False)


def test_the_command_prints_a_table():
    result = CliRunner().invoke(commands, ["resnet18"], catch_exceptions=False)
    head, line = result.stdout.splitlines()
    assert head.split()[:2] == ["name", "params"]
    assert line.split()[:2] == ["resnet18", "11.69M"]
    assert line.endswith("no    smoothed-vit")


def test_the_command_says_what_it_left_out():
    result = CliRunner().invoke(commands, ["xcit_nano_12_p16_*"], catch_exceptions=False)
    _, line, more = result.stdout.splitlines()
    assert line.startswith("xcit_nano_12_p16_224")
    assert more == "1 more in timm: casemate models --all 'xcit_nano_12_p16_*'"


def test_the_command_takes_one_pattern():
    with pytest.raises(CasemateError, match="--all: vit_\\* takes no NAME"):
        CliRunner().invoke(commands, ["resnet18", "--all", "vit_*"], catch_exceptions=False)


def test_families_of_a_figure():
    assert family_of("vit_base_patch16_384.augreg_in21k_ft_in1k") == "vit"
    assert family_of("deit3_small_patch16_224") == "vit"
    assert family_of("resnetv2_152x4_bit.goog_in21k_ft_in1k") == "resnet"
    assert family_of("tiny_vit") == "vit"
    assert family_of("swin_tiny_patch4_window7_224") == "swin"
    assert family_of("python:mine.py:Net") is None
