"""The house: names resolve to this checkout, imports point down, the command line starts light."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import components
import pipelines

ROOT = Path(__file__).resolve().parents[2]


def test_both_packages_load_from_this_checkout():
    assert Path(components.__file__).resolve() == ROOT / "components" / "__init__.py"
    assert Path(pipelines.__file__).resolve() == ROOT / "pipelines" / "__init__.py"


def test_no_package_hides_below_tests():
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_make_runs_every_folder_of_tests():
    """`make test` names folders; the cluster's are run by `make test-cluster`."""
    makefile = (ROOT / "Makefile").read_text()
    folders = {path.relative_to(ROOT).parts[1] for path in (ROOT / "tests").rglob("test_*.py")}
    assert {name for name in folders if f"tests/{name}" not in makefile} == {"cluster"}


def test_the_command_line_imports_nothing_heavy():
    code = "import json, sys; import pipelines.cli.main; print(json.dumps(sorted(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(found.stdout))
    assert "pipelines.cli.main" in loaded
    assert not loaded & {"ray", "mlflow", "torch", "timm", "numpy", "scipy", "pyarrow", "pydantic"}


def test_reading_all_recipes_imports_nothing_numerical():
    code = """
import sys
from pipelines.recipe import load
for name in load.available():
    load.load(name)
print(*sorted({"torch", "timm", "numpy", "scipy", "pyarrow", "ray", "mlflow"} & set(sys.modules)))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == []


def test_imports_point_down():
    lint_imports = Path(sys.executable).parent / "lint-imports"
    found = subprocess.run(
        [lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout
    assert "0 broken" in found.stdout


def contract_members() -> set[str]:
    """Packages and modules that a contract on layers names; whole packages do not count."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    layered = [c for c in tools["importlinter"]["contracts"] if c.get("containers")]
    assert all(contract["exhaustive"] for contract in layered)
    return {
        f"{container}.{name}"
        for contract in layered
        for container in contract["containers"]
        for layer in contract["layers"]
        for name in layer.replace("|", ":").replace(" ", "").split(":")
    }


def test_every_module_is_in_a_contract():
    members = contract_members()
    for package in (components, pipelines):
        folder = Path(package.__file__).resolve().parent
        for file in folder.rglob("*.py"):
            words = file.relative_to(ROOT).with_suffix("").parts
            around = {".".join(words[:count]) for count in range(2, len(words) + 1)}
            assert around & members or words[1:] == ("__init__",), file
