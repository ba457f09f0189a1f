"""Commands that fail on input with a credential in it: no output shows it."""

import io
import sys

import pytest

from pipelines.cli.streams import redacted_output
from tests.e2e.cli import call

SECRET = "hunter2x-5f"
LOGIN = f"alice:{SECRET}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("lint", "demo", "--set", f"storage.root=s3://{LOGIN}@bucket"),
        ("lint", "demo", "--set", f"tracking.url=http://{LOGIN}@host"),  # an unknown key
        ("lint", "demo", "--set", f"tracking=http://{LOGIN}@host"),
        ("lint", "demo", "--set", f"http://{LOGIN}@host"),  # no key at all
        ("lint", "demo", "--set", f"tracking.uri=[http://{LOGIN}@host"),  # not YAML
        ("lint", "demo", "--set", f"data.options.password={SECRET}"),
        ("lint", f"http://{LOGIN}@host/recipe.yaml"),
        ("run", "demo", "--storage", f"s3://{LOGIN}@bucket/runs"),
        ("run", "demo", "--address", f"{LOGIN}@127.0.0.1:1"),
        ("run", "demo", "--set", f"cluster.address=ray://{LOGIN}@127.0.0.1:1"),
        ("submit", "demo", "--address", f"http://{LOGIN}@127.0.0.1:1"),
        ("submit", "demo", "--set", f"tracking.uri=http://{LOGIN}@host:5000"),
        ("status", "--address", f"ftp://{LOGIN}@host"),
        ("verify", f"http://{LOGIN}@host/certificate"),
        ("recipes", f"http://{LOGIN}@host"),
    ],
)
@pytest.mark.parametrize("verbose", [(), ("--verbose",)])
def test_no_error_shows_it(arguments, verbose):
    result = call(*arguments, *verbose)
    assert result.code != 0
    assert SECRET not in result.out + result.err
    assert result.err or result.out


def test_a_printed_recipe_has_the_address_only():
    for more in ((), ("--json",)):
        result = call("recipes", "demo", "--set", f"tracking.uri=http://{LOGIN}@host:5000", *more)
        assert result.code == 0
        assert SECRET not in result.out
        assert "http://host:5000" in result.out


def test_a_recipe_file_that_is_not_yaml(tmp_path):
    recipe = tmp_path / "broken.yaml"
    recipe.write_text(f"name: x\ntracking: {{uri: 'http://{LOGIN}@host\n")
    result = call("lint", recipe)
    assert result.code == 2
    assert SECRET not in result.out + result.err


def test_streams_hide_values_of_the_environment(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with redacted_output():
        sys.stdout.write(f"the server said {SECRET}\n")
        sys.stdout.writelines([SECRET, "\n"])
        assert not sys.stdout.isatty()
    assert sys.stdout is out
    assert out.getvalue() == "the server said ***\n***\n"
