"""Paths in recipes: all are found, relative ones are resolved or refused."""

from pathlib import Path

import pytest

from components.core.errors import CasemateError
from pipelines.recipe import load
from pipelines.recipe.paths import named_paths, refuse_relative, with_paths_of

RELATIVE = {
    "data.path": "images",
    "data.synthetic.path": "made.npz",
    "model.pretrained": "weights/start",
    "train.objective.denoiser": "diffusers:weights/unet",
    "train.variants.cleaner.model.pretrained": "model:weights/cleaner",
    "certify.l2.denoiser": "model:weights/cleaner",
    "evaluate.corruptions.textures": "frost",
    "evaluate.shifts.other.path": "shifted",
    "evaluate.shape_bias.path": "stimuli",
    "evaluate.transfer.models.theirs": "weights/theirs",
    "report.compare.theirs.path": "theirs.tsv",
    "storage.root": "runs",
    "tracking.uri": "sqlite:///mlflow.db",
}


@pytest.fixture
def recipe():
    """Every kind of path, all relative."""
    values = {
        "name": "paths",
        "data": {"source": "folder", "image_size": 32, "synthetic": {"source": "npz"}},
        "model": {"architecture": "resnet18"},
        "train": {
            "objective": {"kind": "denoised", "sigma": 0.25},
            "variants": {
                "cleaner": {
                    "objective": {"kind": "denoiser", "sigmas": [0.25]},
                    "model": {"architecture": "unet"},
                }
            },
        },
        "evaluate": {"shifts": {"other": {"source": "folder"}}},
        "certify": {"l2": {"kind": "gaussian", "sigma": 0.25}},
        "report": {"compare": {"theirs": {}}},
    }
    for key, value in RELATIVE.items():
        load.set_key(values, key, value)
    return load.parse(values, source="paths.yaml")


def test_every_path_is_found(recipe):
    assert {p.key: p.prefix + p.path for p in named_paths(recipe)} == RELATIVE


def test_file_options_of_a_source_are_paths_but_built_in_words_are_not():
    for value, found in (("list.txt", ["data.options.test_ids"]), ("robustbench", [])):
        data = {"source": "imagenet", "path": "/data", "options": {"test_ids": value}}
        recipe = load.parse({"name": "a", "data": data}, source="a.yaml")
        relative = [p.key for p in named_paths(recipe) if p.relative]
        assert relative == [*found, "storage.root"]


def test_the_ready_recipes_name_no_path_that_is_not_listed():
    """A value that looks like a path of `data/` or `weights/` is one of the listed."""
    for name in load.available():
        recipe = load.load(name)
        listed = {p.prefix + p.path for p in named_paths(recipe)}
        assert {text for text in _texts(recipe.resolved()) if _is_path(text)} <= listed, name


def _texts(values):
    if isinstance(values, dict | list):
        inner = values.values() if isinstance(values, dict) else values
        return [text for value in inner for text in _texts(value)]
    return [values] if isinstance(values, str) else []


def _is_path(text: str) -> bool:
    return text.partition(":")[2].startswith(("data/", "weights/")) or text.startswith(
        ("data/", "weights/")
    )


def test_relative_paths_are_resolved_where_the_cluster_is_this_machine(recipe, tmp_path):
    for named in named_paths(recipe):
        if not named.made:
            (tmp_path / named.path).mkdir(parents=True, exist_ok=True)
    settled = with_paths_of(recipe, tmp_path)
    assert not [p.key for p in named_paths(settled) if p.relative]
    resolved = settled.resolved()
    assert resolved["data"]["path"] == f"{tmp_path}/images"
    assert resolved["train"]["objective"]["denoiser"] == f"diffusers:{tmp_path}/weights/unet"
    assert resolved["tracking"]["uri"] == f"sqlite:///{tmp_path}/mlflow.db"
    refuse_relative(settled)


def test_a_relative_path_that_is_not_here_is_refused(recipe, tmp_path):
    with pytest.raises(CasemateError, match=r"data\.path: images does not exist: .*images"):
        with_paths_of(recipe, tmp_path)


def test_relative_paths_are_refused_for_other_machines(recipe):
    with pytest.raises(CasemateError, match=r"data\.path: images is relative.*not this machine"):
        refuse_relative(recipe)
    values = {"name": "a", "data": {"source": "digits"}}
    with pytest.raises(
        CasemateError, match=r"storage\.root: runs is relative.*set --storage to s3://"
    ):
        refuse_relative(load.parse(values, source="a.yaml"))
    values["storage"] = {"root": str(Path("/shared/runs"))}
    refuse_relative(load.parse(values, source="a.yaml"))
