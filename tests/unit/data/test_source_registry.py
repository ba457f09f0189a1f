"""The list of sources: complete, consistent with what opens, and shown by the command."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from components.core.errors import CasemateError
from components.data.sources import SOURCE_NAMES, all_sources, find_source, open_source
from components.data.sources.stamp import source_stamp
from pipelines.cli.data import commands


def test_every_named_dataset_is_known():
    wanted = """
        mnist5k digits folder npz parquet mnist fashion_mnist cifar10 cifar100 torchvision:cifar10
        torchvision:cifar100 cifar10_c imagenet imagenet100 imagenet_r imagenet_a imagenet_v2
        imagenet_sketch imagenet_c caltech101 flowers102
    """
    assert set(wanted.split()) <= set(SOURCE_NAMES)
    assert find_source("hf:beans").path == "optional"


@pytest.mark.parametrize("info", all_sources(), ids=lambda info: info.name)
def test_options_are_arguments_of_the_opener(info):
    """A name in the table that the function lacks would fail only when somebody uses it."""
    import inspect

    parameters = inspect.signature(info.opener()).parameters
    for option in info.options:
        argument = parameters[option.name]
        assert argument.kind is inspect.Parameter.KEYWORD_ONLY
        assert (argument.default is inspect.Parameter.empty) == option.required
    assert json.dumps(info.facts())


@pytest.mark.parametrize(
    ("name", "path", "options", "message"),
    [
        ("digits", None, {"subset": True}, "is not an option of source digits; allowed: none"),
        ("caltech101", "x", {"backgruond": False}, "allowed: background, train_per_class"),
        ("caltech101", "x", {"background": 0}, "0 must be true or false"),
        ("caltech101", "x", {"train_per_class": "30"}, "'30' must be a whole number or null"),
        ("mnist", None, {}, "data.path: None must be set for source mnist: folder with the four"),
        ("hf:", None, {}, "hf: is unknown; "),
    ],
)
def test_wrong_settings_are_named(name, path, options, message):
    with pytest.raises(CasemateError, match=message) as caught:
        open_source(name, path=path, options=options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["folder", "mnist", "imagenet", "imagenet_r", "parquet", "npz"])
def test_a_path_that_does_not_exist_is_named(name, tmp_path):
    with pytest.raises(CasemateError, match="nowhere") as caught:
        open_source(name, path=str(tmp_path / "nowhere"))
    assert caught.value.key == "data.path"


def test_stamp_follows_the_files_that_options_name(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((1, 2, 2), np.uint8), labels=np.array([0]))
    assert source_stamp("npz", str(tmp_path / "a.npz"), {}) == source_stamp(
        "npz", str(tmp_path / "a.npz")
    )
    (tmp_path / "root").mkdir()
    first, second = tmp_path / "map.txt", tmp_path / "copy.txt"
    first.write_text("one")
    second.write_text("one")
    root = str(tmp_path / "root")
    plain = source_stamp("imagenet", root, {"subset": True})
    stamp = source_stamp("imagenet", root, {"val_map": str(first)})
    assert stamp != plain
    assert source_stamp("imagenet", root, {"val_map": str(second)}) == stamp
    first.write_text("two")
    assert source_stamp("imagenet", root, {"val_map": str(first)}) != stamp
    assert source_stamp("imagenet", root, {"test_ids": "robustbench"}) == plain


def run(*words: str) -> str:
    result = CliRunner().invoke(commands, ["data", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_command_lists_all_and_shows_one():
    rows = json.loads(run("--json"))
    assert [row["name"] for row in rows] == [info.name for info in all_sources()]
    lines = run().splitlines()
    assert len(lines) == len(rows)
    assert all(line.startswith(row["name"]) for line, row in zip(lines, rows, strict=True))
    one = json.loads(run("flowers102", "--json"))
    assert (one["classes"], one["num_items"]) == (102, 8189)
    assert one["splits"] == {"train": 1020, "val": 1020, "test": 6149}
    page = run("imagenet_c")
    assert "evaluation only" in page
    assert "data.options.severity" in page
    with pytest.raises(CasemateError, match="imagnet is unknown"):
        run("imagnet")
