"""`extends`: a recipe on top of another one, and every way to get it wrong."""

import pytest
import yaml

from components.core.errors import CasemateError
from components.core.settings import plain
from pipelines.recipe.load import available, find, load, loads, merged
from pipelines.recipe.schema.base import keys_with_off
from tests.refusals import refusal_of

CHILD = """
extends: demo
name: child
train: {objective: {eps: 0.2}, epochs: 3}
attack: {linf: {attacks: [{kind: pgd}]}}
"""


def test_values_of_the_child_win_and_the_rest_stays():
    child, parent = loads(CHILD, source="child"), load("demo")
    assert (child.name, child.train.epochs, child.train.objective.eps) == ("child", 3, 0.2)
    assert child.train.objective.eps_warmup_epochs == parent.train.objective.eps_warmup_epochs
    assert [a.kind for a in child.attack["linf"].attacks] == ["pgd"]  # lists are replaced whole
    assert child.attack["linf"].models == parent.attack["linf"].models
    assert (child.data, child.certify, child.seed) == (parent.data, parent.certify, parent.seed)


def test_a_section_of_another_kind_replaces_the_whole_section():
    text = CHILD.replace("{eps: 0.2}", "{kind: standard}")
    assert plain(loads(text, source="child").train.objective) == {
        "kind": "standard",
        "criterion": "ce",
    }


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("certify: null", lambda child: child.certify == {}),
        ("certify: {l2: null}", lambda child: list(child.certify) == ["patch"]),
        ("tune: null", lambda child: child.tune is None),
        ("train: {objective: null}", lambda child: child.train.objective.kind == "standard"),
        ("attack: {linf: {curves: null}}", lambda child: child.attack["linf"].curves is None),
    ],
)
def test_null_takes_an_inherited_section_away(line, left):
    assert not left(load("demo"))
    assert left(loads(f"extends: demo\nname: child\n{line}\n", source="child"))


def test_null_that_means_off_stays():
    """Left out, these three are on: taking the parent's away would switch them on again."""
    base = "{name: b, data: {source: digits}, train: {clip_norm: 2}, attack: {linf: {eps: 0.1, "
    base += "attacks: [{kind: pgd}], sanity: {num_items: 8}}}}"
    under, over = yaml.safe_load(base), {"train": {"clip_norm": None}}
    result = merged(under, over | {"attack": {"linf": {"sanity": None}}})
    assert result["train"]["clip_norm"] is None
    assert result["attack"]["linf"]["sanity"] is None
    assert keys_with_off() == {"clip_norm", "evaluate", "sanity", "search"}


def test_null_alone_takes_nothing_away():
    with pytest.raises(CasemateError, match=r"attack.linf: None is not a section"):
        loads("{name: x, data: {source: digits}, attack: {linf: null}}", source="x")


def test_nothing_of_it_is_left_in_the_resolved_recipe():
    child = loads(CHILD, source="child")
    assert "extends" not in child.resolved()
    assert loads(child.to_yaml(), source="again") == child


def test_overrides_come_last():
    child = loads(CHILD, source="child", overrides=["train.epochs=7", "seed=9"])
    assert (child.train.epochs, child.seed) == (7, 9)


def test_paths_are_seen_from_the_file_that_names_them(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "base.yaml").write_text("{name: base, seed: 4, data: {source: digits}}")
    (tmp_path / "inner" / "middle.yaml").write_text("{extends: ../base.yaml, name: middle}")
    (tmp_path / "top.yaml").write_text("{extends: inner/middle.yaml, name: top}")
    top = load(str(tmp_path / "top.yaml"))
    assert (top.name, top.seed, top.data.source) == ("top", 4, "digits")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("extends: dmo", "extends: dmo is unknown; did you mean 'demo'?"),
        ("extends: ./nowhere.yaml", "nowhere.yaml is not a file; check the path"),
        (
            "extends: [demo]",
            "extends: ['demo'] is neither the name of a ready recipe nor a YAML path",
        ),
        ("extends:", "extends: None is neither the name of a ready recipe nor a YAML path"),
    ],
)
def test_mistakes_are_one_line(line, message):
    told = refusal_of(loads, f"name: child\n{line}\n", source="child.yaml")
    assert told.startswith("child.yaml: extends")
    assert message in told


def test_a_circle_is_refused(tmp_path):
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"{{extends: {other}.yaml, name: {name}}}")
    with pytest.raises(CasemateError, match="leads back to itself"):
        load(str(tmp_path / "a.yaml"))
    (tmp_path / "own.yaml").write_text("{extends: own.yaml, name: own}")
    with pytest.raises(CasemateError, match="leads back to itself"):
        load(str(tmp_path / "own.yaml"))


def test_a_name_is_not_inherited():
    with pytest.raises(CasemateError, match=r"name:.*is missing"):
        loads("extends: demo", source="child")


def test_the_parent_is_left_as_it_was():
    parent = {"a": {"b": [1], "c": {"d": 1}}}
    result = merged(parent, {"a": {"c": {"d": 2, "e": 3}}})
    result["a"]["b"].append(2)
    assert parent == {"a": {"b": [1], "c": {"d": 1}}}
    assert result["a"]["c"] == {"d": 2, "e": 3}


@pytest.mark.parametrize("name", available())
def test_ready_recipes_extend_ready_recipes(name):
    """Never a path: what a user copies out of the folder still resolves."""
    parent = yaml.safe_load(find(name).read_text()).get("extends", "demo")
    assert parent in available()
