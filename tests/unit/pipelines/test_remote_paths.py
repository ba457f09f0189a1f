"""URIs in recipes: never taken for paths, refused where they cannot be, looked at by lint."""

import re
from pathlib import Path

import pytest
import yaml

from components.core.errors import CasemateError
from components.data.sources import open_source
from pipelines.recipe.lint import warnings_of
from pipelines.recipe.load import loads
from pipelines.recipe.paths import named_paths, refuse_relative, with_paths_of
from pipelines.runtime.store import Store
from tests.refusals import refusal_of

URI = "s3://bucket/my images"


def recipe_of(**sections):
    values = {
        "name": "remote",
        "data": {"source": "folder", "path": URI, "image_size": 8},
        "storage": {"root": "/tmp/somewhere"},
    }
    return loads(yaml.safe_dump(values | sections), source="remote.yaml")


def test_a_uri_is_absolute_and_stays_as_written(tmp_path):
    made = {"source": "npz", "path": "gs://bucket/generated.npz"}
    recipe = recipe_of(data={"source": "folder", "path": URI, "image_size": 8, "synthetic": made})
    assert {named.key: named.relative for named in named_paths(recipe)} == {
        "data.path": False,
        "data.synthetic.path": False,
        "storage.root": False,
    }
    refuse_relative(recipe)
    assert with_paths_of(recipe, Path(tmp_path)) == recipe
    assert recipe.data.path == URI


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"data": {"source": "npz", "path": "s3:/bucket/x.npz"}},
            "remote.yaml: data.path: s3:/bucket/x.npz has too few slashes; "
            "write s3://bucket/prefix",
        ),
        (
            {"data": {"source": "folder", "path": "https://host/x"}},
            "remote.yaml: data.path: https://host/x has a scheme that cannot be read; "
            "choose s3://, gs://, az:// or a path",
        ),
        (
            {"evaluate": {"shifts": {"other": {"path": "s3://bucket/prepared"}}}},
            "remote.yaml: evaluate.shifts.other.path: s3://bucket/prepared is a URI; "
            "a prepared dataset is a folder: prepare raw images instead",
        ),
        (
            {"evaluate": {"corruptions": {"textures": "s3://bucket/frost"}}},
            "remote.yaml: evaluate.corruptions.textures: s3://bucket/frost is a URI; "
            "textures are read from a folder that all machines see",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_without_a_network(sections, line):
    assert refusal_of(recipe_of, **sections) == line


def test_lint_says_in_one_line_that_a_store_does_not_answer(monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }.items():
        monkeypatch.setenv(name, value)
    made = {"source": "npz", "path": "s3://bucket/made.npz"}
    recipe = recipe_of(data={"source": "folder", "path": URI, "image_size": 8, "synthetic": made})
    assert {w.key: w.message for w in warnings_of(recipe)} == {
        "data.path": f"{URI} refuses connections; check AWS_ENDPOINT_URL",
        "data.synthetic.path": "s3://bucket/made.npz refuses connections; check AWS_ENDPOINT_URL",
    }


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "nonsense", "http://127.0.0.1:99999"])
def test_an_endpoint_that_is_not_a_url_is_one_line(monkeypatch, endpoint):
    """obstore would end the process."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    line = rf"^AWS_ENDPOINT_URL: {re.escape(endpoint)} is not the URL of a server; write http://"
    with pytest.raises(CasemateError, match=line):
        Store("s3://bucket/runs").find("x")
    with pytest.raises(CasemateError, match=line):
        open_source("folder", path="s3://bucket/images")
