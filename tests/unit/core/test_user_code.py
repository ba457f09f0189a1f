"""Code of the user's own: pinned by content, imported from a copy, refused in one line."""

import os
import pickle
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from components.core import user_code
from components.core.code_copies import code_files, copy_of
from components.core.settings import SettingError, plain
from components.core.user_code import (
    UserEntry,
    checked_options,
    load,
    pinned,
    reading,
    settings_class,
)

THING = """
from dataclasses import dataclass


class Thing:
    @dataclass(frozen=True)
    class Settings:
        size: int = 3

    def where(self):
"""
MAIN = (
    "import {helper}\n"
    + THING
    + """
        import {late}

        return {helper}.X, {late}.X


def build(*, side, width: int = 4, depth):
    return side, width, depth


class Loose:
    @dataclass
    class Settings:
        size: int = 3


class Bare:
    pass
"""
)
names = iter(range(1000))  # every test has modules of its own names


@pytest.fixture
def mine(tmp_path):
    """A folder with `main`, which imports `helper` at once and `late` in a function."""
    number = next(names)
    main, helper, late = f"main_{number}", f"helper_{number}", f"late_{number}"
    (tmp_path / f"{main}.py").write_text(MAIN.format(helper=helper, late=late))
    (tmp_path / f"{helper}.py").write_text("X = 1")
    (tmp_path / f"{late}.py").write_text("X = 1")
    (tmp_path / "unused.py").write_text("X = 1")
    with reading(base=tmp_path, trusted=True):
        yield tmp_path, main, helper, late


def test_a_reference_is_pinned_by_the_content_of_all_its_files(mine):
    folder, main, helper, late = mine
    first = pinned(f"python:{main}.py:Thing", field="kind")
    assert pinned(first, field="kind") == first
    digest = first.partition("@")[2].partition(":")[0]
    assert {file.stem for file in code_files(copy_of(digest))} == {main, helper, late}
    (folder / "unused.py").write_text("X = 2")
    assert pinned(f"python:{main}.py:Thing", field="kind") == first
    (folder / f"{late}.py").write_text("X = 2")
    second = pinned(f"python:{main}.py:Thing", field="kind")
    assert second != first
    # the place does not count, and both states can be used at the same time
    assert load(first, field="kind")().where() == (1, 1)
    assert load(second, field="kind")().where() == (1, 2)


def test_references_inside_plain_values_are_pinned_and_counted(mine):
    _, main, *_ = mine
    values = {"space": {"model.architecture": [f"python:{main}.py:build", "tiny_vit"]}, "n": 3}
    found = user_code.pinned_inside(values)
    one, other = found["space"]["model.architecture"]
    assert (one, other) == (pinned(f"python:{main}.py:build", field=""), "tiny_vit")
    assert [f"@{digest}:" in one for digest in user_code.digests(found)] == [True]
    with pytest.raises(SettingError, match=r"^space\.a\.0: 'python:no"):
        user_code.pinned_inside({"space": {"a": ["python:no_such.py:X"]}})


def test_code_runs_from_the_copy_alone(mine):
    folder, main, *_ = mine
    reference = pinned(f"python:{main}.py:Thing", field="kind")
    for file in folder.glob("*.py"):
        file.unlink()
    thing = load(reference, field="kind")
    assert Path(sys.modules[thing.__module__].__file__).parent.name.startswith("casemate_user_")
    assert thing().where() == (1, 1)


def test_a_package_is_found_without_importing_it(tmp_path):
    number = next(names)
    inner = tmp_path / f"pack_{number}" / "deep"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("")
    (inner / "thing.py").write_text("from ..common import X\nclass Thing:\n    x = X\n")
    (inner.parent / "common.py").write_text("X = 7")
    (inner.parent / "other.py").write_text("1 / 0")
    with reading(base=tmp_path, trusted=True):
        reference = pinned(f"python:pack_{number}.deep.thing:Thing", field="kind")
        assert f"pack_{number}" not in sys.modules
        assert load(reference, field="kind").x == 7


def test_nothing_is_resolved_where_recipes_are_not_trusted(mine):
    folder, main, *_ = mine
    with reading(base=folder, trusted=False):
        assert pinned(f"python:{main}.py:Thing", field="kind") == f"python:{main}.py:Thing"
        with pytest.raises(SettingError, match="not trusted"):
            load(f"python:{main}.py:Thing", field="kind")
    assert main not in sys.modules


def test_refusals_are_one_line(mine):
    folder, main, *_ = mine
    (folder / "json.py").write_text("X = 1")
    (folder / "pytest.py").write_text("X = 1")
    (folder / "breaks.py").write_text("1 / 0")
    (folder / "leaves.py").write_text("import sys; sys.exit(3)")
    (folder / "half.py").write_text("def")
    for reference, words in {
        "nowhere.py:X": "names a file that does not exist",
        "no.such.module:X": "names a module that is not found here: no.such.module",
        f"{main}.py:Thin": "Thin is unknown; did you mean 'Thing'? allowed: Bare, Loose, Thing",
        f"{main}.py": "is not of the form python:file.py:Name",
        f"{main}.py:": "is not of the form",
        "json.py:X": "module json has the name of a module of the standard library; rename it",
        "pytest.py:X": "module pytest has the name of another one",
        "breaks.py:X": "fails to import: ZeroDivisionError: division by zero",
        "leaves.py:X": "fails to import: SystemExit: 3",
        "half.py:X": "cannot be read: invalid syntax",
        f"{main}.py@0123456789abcdef:X": "has no code on this machine",
    }.items():
        with pytest.raises(SettingError) as caught:
            load(f"python:{reference}", field="kind")
        assert words in str(caught.value)
        assert str(caught.value).startswith("kind: 'python:")
        assert "\n" not in str(caught.value)
    for name, words in {"Bare": "has no settings", "Loose": "mutable settings"}.items():
        with pytest.raises(SettingError, match=words):
            user_code.settings_class(f"python:{main}.py:{name}", field="kind")


def test_a_copy_that_was_changed_is_refused(mine):
    _, main, helper, _ = mine
    reference = pinned(f"python:{main}.py:Thing", field="kind")
    copy = copy_of(reference.partition("@")[2].partition(":")[0])
    (copy / f"{helper}.py").write_text("X = 99")
    with pytest.raises(SettingError, match="has a modified copy"):
        load(reference, field="kind")


def test_options_fit_the_signature(mine):
    _, main, *_ = mine
    reference = f"python:{main}.py:build"
    given = {"field": "architecture", "given": ("side",)}
    assert checked_options(reference, {"depth": 2}, **given) == {"depth": 2}
    for options, words in (
        ({"depth": 2, "wdith": 3}, "options.wdith: 3 is unknown; did you mean 'width'"),
        ({}, "options.depth: is missing"),
        ({"depth": 2, "side": 3}, "options.side: 3 is unknown"),
    ):
        with pytest.raises(SettingError) as caught:
            checked_options(reference, options, **given)
        assert words in str(caught.value)
    with pytest.raises(SettingError, match="needs an argument channels"):
        checked_options(reference, {}, field="architecture", given=("channels",))


def test_options_fit_the_settings(mine):
    _, main, *_ = mine
    reference = f"python:{main}.py:Thing"
    assert checked_options(reference, {}, field="source") == {"size": 3}
    with pytest.raises(SettingError, match=r"options\.size: 'x' is not a whole number"):
        checked_options(reference, {"size": "x"}, field="source")


def test_an_entry_travels_as_reference_and_settings(mine):
    _, main, *_ = mine
    kind = pinned(f"python:{main}.py:Thing", field="kind")
    entry = UserEntry(kind=kind, settings=user_code.settings_class(kind, field="kind")(size=5))
    assert plain(entry) == {"kind": kind, "size": 5}
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).settings)"
    found = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(entry), capture_output=True, check=True
    )
    assert found.stdout.decode().strip() == "Thing.Settings(size=5)"


SIBLING = (
    "import {helper}.part as part\n"
    + THING
    + """
        from {helper} import X
        import {helper}.part

        return X, {helper}.part.Y, part.Y
"""
)


@pytest.fixture
def twins(tmp_path):
    """Two references to files of one name, each beside a package `helper` of its own."""
    number = next(names)
    references = []
    for value, folder in enumerate((tmp_path / "a", tmp_path / "b")):
        helper = folder / f"helper_{number}"
        helper.mkdir(parents=True)
        (helper / "__init__.py").write_text(f"X = {value}")
        (helper / "part.py").write_text(f"from . import X\nY = {value}")
        (folder / f"same_{number}.py").write_text(SIBLING.format(helper=helper.name))
        with reading(base=folder, trusted=True):
            references.append(pinned(f"python:same_{number}.py:Thing", field="kind"))
    return references


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_every_copy_imports_its_own_modules_at_any_time(twins, order):
    things = {value: load(twins[value], field="kind") for value in order}
    for value in (*order, *reversed(order)):  # imports inside functions come after both loads
        assert things[value]().where() == (value, value, value)


def test_settings_of_files_of_one_name_travel_together(twins):
    made = [settings_class(kind, field="kind")(size=n) for n, kind in enumerate(twins)]
    entries = [UserEntry(kind=k, settings=s) for k, s in zip(twins, made, strict=True)]
    code = "import pickle, sys; print([(x.settings.size, x.load()().where()) for x in "
    code += "pickle.load(sys.stdin.buffer)])"
    found = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(entries), capture_output=True, check=True
    )
    assert found.stdout.decode().strip() == "[(0, (0, 0, 0)), (1, (1, 1, 1))]"


def test_code_outside_the_digest_is_refused(tmp_path, monkeypatch):
    number = next(names)
    library, folder = tmp_path / "lib", tmp_path / "mine"
    (library / f"spread_{number}").mkdir(parents=True)  # a namespace package
    folder.mkdir()
    (library / f"ext_{number}.py").write_text("SCALE = 1")
    (library / f"spread_{number}" / "part.py").write_text("SCALE = 1")
    monkeypatch.syspath_prepend(str(library))
    (folder / f"early_{number}.py").write_text(f"import ext_{number}\nclass Thing: pass")
    (folder / f"inner_{number}.py").write_text(f"import early_{number}\nclass Thing: pass")
    (folder / f"space_{number}.py").write_text(f"from spread_{number} import part")
    (folder / f"late_ext_{number}.py").write_text(
        f"import json, sys, torch, components.core\ndef build():\n    import ext_{number}"
    )
    with reading(base=folder, trusted=True):
        for file in ("early", "inner", "space"):
            with pytest.raises(SettingError, match="is not part of the code's digest; put it"):
                load(f"python:{file}_{number}.py:Thing", field="kind")
        build = load(f"python:late_ext_{number}.py:build", field="kind")
        with pytest.raises(ImportError, match=f"module ext_{number} is imported from"):
            build()


def test_only_sources_are_run_and_copies_stay_as_they_are(mine):
    _, main, helper, _ = mine
    reference = pinned(f"python:{main}.py:Thing", field="kind")
    copy = copy_of(reference.partition("@")[2].partition(":")[0])
    source = copy / f"{helper}.py"
    kept = source.read_bytes(), source.stat()
    source.write_text("X = 9")
    bytecode = Path(py_compile.compile(str(source)))  # of another source, but of its size and time
    source.write_bytes(kept[0])
    os.utime(source, ns=(kept[1].st_atime_ns, kept[1].st_mtime_ns))
    stamp = int(kept[1].st_mtime).to_bytes(4, "little")
    bytecode.write_bytes(bytecode.read_bytes()[:8] + stamp + bytecode.read_bytes()[12:])
    assert load(reference, field="kind")().where() == (1, 1)
    assert [path.name for path in copy.rglob("*.pyc")] == [bytecode.name]
