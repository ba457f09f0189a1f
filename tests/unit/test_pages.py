"""Pages say what is true: commands parse, paths exist, targets exist, recipes are valid.

Nothing is executed: the command line is asked what it knows.
"""

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.exceptions import TyperException

from components.core.errors import CasemateError
from infra.docs import reference, site
from pipelines.cli.main import app
from pipelines.recipe import load as recipes
from tests.pages import FENCE, fenced

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("components", "pipelines", "tests", "notebooks", "infra")
PAGES = sorted([*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))])
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CLI = typer.main.get_command(app)
ENDS = ("|", "&&", ";", ">")  # of a command

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
by_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.name)


def code_spans(page: Path) -> list[str]:
    """Inline code outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text()))


def shell_lines(page: Path) -> list[list[str]]:
    """Words of every line in shell blocks, comments removed, continued lines joined."""
    blocks = (block.replace("\\\n", " ") for block in fenced(page, "bash", "sh"))
    split = (shlex.split(line, comments=True) for block in blocks for line in block.splitlines())
    return [words for words in split if words]


def casemate_calls(page: Path) -> list[list[str]]:
    """Arguments of every `casemate` call in shell blocks."""
    calls = []
    for words in shell_lines(page):
        for start, word in enumerate(words):
            if Path(word).name == "casemate" and begins_command(words[:start]):
                ends = [i for i, w in enumerate(words) if i > start and w in ENDS]
                calls.append(words[start + 1 : min(ends, default=len(words))])
    return calls


def begins_command(before: list[str]) -> bool:
    """Whether a word after these is a command; after others than variables it is an argument."""
    begins = [i + 1 for i, word in enumerate(before) if word in ENDS]
    return all(re.match(r"\w+=", word) for word in before[max(begins, default=0) :])


def parse(arguments: list[str]) -> dict[str, Any]:
    """The parameters of a call, parsed as the command line would, without running anything."""
    name, *rest = (argument for argument in arguments if argument != "--verbose")
    command = CLI.commands[name]
    params: dict[str, Any] = command.make_context(name, rest).params
    return params


def check_call(arguments: list[str]) -> None:
    """Command and options exist; `--set` keys exist in the recipe they are meant for."""
    given = parse(arguments)
    if given.get("recipe") in recipes.available():
        recipes.load(given["recipe"], overrides=given.get("set_") or [])


@by_page
def test_every_casemate_call_is_one_the_command_line_takes(page):
    for arguments in casemate_calls(page):
        check_call(arguments)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("price demo", KeyError),
        ("run demo --workers 3", TyperException),
        ("run", TyperException),
        ("verify runs/x --resample few", TyperException),
        ("run demo --set train.epoch=2", CasemateError),
    ],
)
def test_the_check_sees_a_wrong_call(call, error):
    with pytest.raises(error):
        check_call(call.split())


def test_the_pages_show_every_command():
    shown = {arguments[0] for page in PAGES for arguments in casemate_calls(page)}
    assert shown >= {name for name, command in CLI.commands.items() if not command.hidden}


def test_the_readme_fits_a_few_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


def test_the_readme_begins_with_its_two_commands():
    first = fenced(ROOT / "README.md", "bash")[0]
    assert [line.split("#")[0].split() for line in first.splitlines()] == [
        ["make", "demo"],
        ["make", "test"],
    ]


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_generated_page_is_what_the_code_says(name):
    """`make docs` writes the page anew."""
    assert (ROOT / name).read_text() == reference.PAGES[name]()


def test_the_site_has_every_page():
    listed = re.findall(r": (\S+\.md)$", site.CONFIG.read_text(), re.MULTILINE)
    assert sorted(listed) == [page.relative_to(ROOT).as_posix() for page in site.pages()]


def test_the_site_is_built_offline(tmp_path):
    site.build(tmp_path)
    first = (tmp_path / "site" / "index.html").read_text()
    assert "notebooks/guides/first-run.html" in first
    loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']?(https?://[^\"' >]+)", first)
    assert loaded == []


@by_page
def test_commands_in_running_text_exist(page):
    for span in code_spans(page):
        if called := re.match(r"casemate ([a-z][a-z-]*)", span):
            assert called[1] in CLI.commands, span


@by_page
def test_every_make_target_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = [*code_spans(page), *fenced(page, "bash", "sh")]
    named = {name for text in code for name in re.findall(r"\bmake ([a-z][a-z-]*)", text)}
    assert named <= targets


@by_page
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        assert (page.parent / target.partition("#")[0]).exists(), target


def names_a_path(span: str) -> bool:
    """Inline code that can only be meant as a place in this repository."""
    if not re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", span) or span.startswith(("runs/", "../")):
        return False
    inside = span.split("/")[0] in FOLDERS and "/" in span
    return inside or span.endswith((".py", ".md", ".ipynb"))


def exists_from(page: Path, span: str) -> bool:
    """Whether a path exists, as seen from the page or from the top of the repository."""
    return any(any(base.glob(span.rstrip("/"))) for base in (page.parent, ROOT))


@by_page
def test_every_path_named_exists(page):
    missing = [s for s in code_spans(page) if names_a_path(s) and not exists_from(page, s)]
    words = {word.rpartition("=")[2].rstrip(";") for line in shell_lines(page) for word in line}
    named = [word for word in sorted(words) if word.startswith(("tests/", "infra/"))]
    missing += [word for word in named if not exists_from(page, word) and not word.endswith(".env")]
    assert not missing


def test_folder_pages_name_their_folders():
    for folder in (ROOT / "components", ROOT / "tests"):
        spans = set(code_spans(folder / "README.md"))
        rooms = [p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(("_", "."))]
        assert {f"{p.name}/" for p in rooms} <= spans


@by_page
def test_recipes_on_pages_are_valid(page):
    for text in fenced(page, "yaml"):
        recipes.loads(text, source=page.name)


def test_the_readme_shows_a_recipe():
    assert fenced(ROOT / "README.md", "yaml")


# Assembled, so that this file does not contain what it looks for.
PLACES = re.compile(r"(?<![\w.<>*])/(" + "|".join(["home", "root", "work", "tmp", "Users"]) + r")/")
HOSTS = re.compile(
    r"\b(" + "|".join(["pypi", "pythonhosted", r"docker\.io", r"(ghcr|quay|gcr)\.io"]) + r")\b|"
    r"index[-_]url",
    re.IGNORECASE,
)


@pytest.mark.parametrize("file", [*PAGES, *NOTEBOOKS], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_page_names_a_machine_or_a_package_index(file):
    text = file.read_text()
    assert not PLACES.findall(text)
    assert not HOSTS.findall(text)


@by_notebook
def test_notebooks_hold_no_outputs(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@by_notebook
def test_notebooks_define_nothing(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            for node in ast.walk(ast.parse("".join(cell["source"]))):
                kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
                assert not isinstance(node, kinds), cell["id"]


def test_hooks_need_no_network():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {entry["repo"] for entry in config["repos"]} == {"local"}
    for hook in (hook for entry in config["repos"] for hook in entry["hooks"]):
        assert hook["language"] == "system"
        program, *arguments = hook["entry"].split()
        assert (ROOT / program).is_file(), program
        assert all((ROOT / a).exists() for a in arguments if a.startswith("tests/")), hook["entry"]
