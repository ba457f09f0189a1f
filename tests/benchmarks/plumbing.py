"""How hard the plumbing is to change, in figures, for any checkout: this one or the one named.

`python -m tests.benchmarks.plumbing [CHECKOUT]`, with `--json`, with `--static` for what needs no
run (seconds), with `--list` for the lines and defaults behind the figures. Files are parsed and
commands are started as processes; nothing of the checkout is imported here.

lines       of the *.py files of components and pipelines; `code` leaves out blank lines, comments
            and strings that stand alone (docstrings).
kinds       lines that tell kinds of certificates apart: `plumbing_kinds` says which. `outside` is
            what lies outside components/certify and pipelines/stages/certify*.
defaults    defaults of sections and settings that another class or function repeats:
            `plumbing_defaults` says which. `in classes`: at least one repetition is in a class.
crossed     modules of pipelines that `casemate run demo`, shortened by `--set`, enters in the
            driver until the first certificate (a patch certificate) is on disk, and hops between
            them: distinct pairs of calling and called module, where what is called from a library
            counts for the module that called the library. What happens while `run` of another
            stage than certify works (any function of that name in pipelines.stages) and while
            modules are imported does not count: the path of one certificate, not the work of the
            stages before it. `stack`: those between the command and the file, one
            calling the next, at the moment the certificate is written.
Any         share of functions with `Any` in the annotation of a parameter or of the result.
duplicates  pairs of places with six or more equal or equally shaped lines, in the whole tree
            (tests included) and inside each package, by the command `duplicates` if there is one.
seconds     of the processor, user and system, of a command with its child processes: the median of
            three. `lint` of the demo and of the recipes that took longest when this was written.
flat        *.py files directly in pipelines, without `__init__`.
renames     functions that write a file and rename it: a variable is renamed by `replace` or
            `rename`, and stands in a call whose name says write, save, dump or open.
unnamed     modules that no import-linter contract in pyproject.toml names, neither themselves nor a
            package around them; contracts on whole components or pipelines do not count.

The first version of the house gave 149 lines of 27 files, about 95 defaults, 27 modules with 49
hops (without --smoke), Any in 29 % and 27 %, 96 pairs and 22 flat modules, each by other means.
"""

import argparse
import ast
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.plumbing_defaults import duplicated_defaults
from tests.benchmarks.plumbing_kinds import in_family, kind_lines
from tests.benchmarks.plumbing_source import ROOTS, Function, Module, last_name, read_modules

SLOWEST = ("dds-denoiser", "dds-mnist5k-mini", "certify-100k")  # recipes, in `casemate lint`
ROUNDS = 3
SHORT = (
    "data.limits={train: 256, val: 64, test: 32}",
    "train.epochs=1",
    "train.variants.columns.epochs=1",
    "train.variants.standard.epochs=1",
    "tune.epochs=2",
    "tune.train_items=64",
    "attack.linf.num_items=8",
    "attack.linf.curves=null",
    "certify.patch.num_items=8",
    "certify.patch.challenge=null",
)
ANY_IN = {
    "components/certify": ("components/certify/",),
    "components/certify and its stage": ("components/certify/", "pipelines/stages/certify"),
    "pipelines/stages": ("pipelines/stages/",),
}
WRITES = re.compile(r"write|save|dump|open", re.IGNORECASE)
TRACE = Path(__file__).with_name("plumbing_trace.py")
CROSSED = ("modules", "hops", "stack")
Figures = dict[str, object]


def line_figures(modules: list[Module]) -> Figures:
    figures: Figures = {}
    for root in ROOTS:
        own = [module for module in modules if module.room == root]
        figures[f"lines: {root}"] = sum(module.num_lines() for module in own)
        figures[f"lines: {root}, code"] = sum(module.num_code_lines() for module in own)
    return figures


def kind_figures(modules: list[Module]) -> Figures:
    found = kind_lines(modules)
    outside = {path: lines for path, lines in found.items() if not in_family(path)}
    return {
        f"kinds: {what}": f"{sum(map(len, part.values()))} lines of {len(part)} files"
        for what, part in (("told apart", found), ("told apart, outside the families", outside))
    }


def default_figures(modules: list[Module]) -> Figures:
    found = duplicated_defaults(modules)
    in_classes = sum(any(not o.endswith("()") for o in entry.others) for entry in found)
    return {
        "defaults: written twice": len(found),
        "defaults: written twice, in classes": in_classes,
    }


def any_figures(modules: list[Module]) -> Figures:
    figures: Figures = {}
    for title, places in ANY_IN.items():
        own = [module for module in modules if module.path.startswith(places)]
        marks = [_says_any(function) for module in own for function in module.functions()]
        share = f"{sum(marks)} of {len(marks)}, {100 * sum(marks) / max(1, len(marks)):.1f} %"
        figures[f"Any: functions of {title}"] = share
    return figures


def _says_any(function: Function) -> bool:
    a = function.args
    parts = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    notes = [function.returns, *(part.annotation for part in parts)]
    return any(last_name(node) == "Any" for note in notes if note for node in ast.walk(note))


def place_figures(modules: list[Module], checkout: Path) -> Figures:
    """Where things lie: flat modules, helpers that rename, modules without a contract."""
    unnamed = unnamed_modules(modules, checkout)
    renames = list(renaming_functions(modules))
    return {
        "flat: modules in pipelines": sum(m.is_flat and m.room == "pipelines" for m in modules),
        "renames: functions that write, then rename": len(renames),
        "renames: where": ", ".join(renames) or "-",
        "unnamed: modules in no import contract": len(unnamed),
        "unnamed: which": ", ".join(unnamed) or "-",
    }


def renaming_functions(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for function in module.functions():
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            written = {
                last_name(part)
                for call in calls
                if WRITES.search(last_name(call))
                for part in (getattr(call.func, "value", None), *call.args)
            }
            if any(_renamed(call) in written - {""} for call in calls):
                yield f"{module.name}.{function.name}"


def _renamed(call: ast.Call) -> str | None:
    """`a` of `a.replace(b)` and `os.replace(a, b)`; None for strings (two words), dataclasses."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("replace", "rename"):
        return None
    of_os = last_name(call.func.value) == "os"
    if call.keywords or len(call.args) != 1 + of_os:
        return None
    return last_name(call.args[0] if of_os else call.func.value)


def unnamed_modules(modules: list[Module], checkout: Path) -> list[str]:
    settings = tomllib.loads((checkout / "pyproject.toml").read_text())
    contracts = settings.get("tool", {}).get("importlinter", {}).get("contracts", [])
    named = [name for contract in contracts for name in _named_in(contract) if name not in ROOTS]
    patterns = [re.compile(_pattern(name)) for name in named]
    return [
        module.name
        for module in modules
        if module.name not in ROOTS and not any(p.fullmatch(module.name) for p in patterns)
    ]


def _named_in(contract: dict[str, list[str]]) -> Iterator[str]:
    """All modules that a contract names, layers with the package that contains them."""
    for key in ("source_modules", "forbidden_modules", "modules", "ancestors"):
        yield from contract.get(key, [])
    for layer in contract.get("layers", []):
        for name in re.split(r"[|:]", layer):
            plain = name.strip().strip("()").strip()
            containers = contract.get("containers", [""])
            yield from (f"{c}.{plain}".strip(".") for c in containers)


def _pattern(name: str) -> str:
    """The regular expression for a module and all below it; `*` is one name, `**` any number."""
    words = {"*": r"[^.]+", "**": r".+"}
    return r"\.".join(words.get(w, re.escape(w)) for w in name.split(".")) + r"(\..+)?"


def duplicate_figures(checkout: Path) -> Figures:
    command = shutil.which("duplicates")
    figures: Figures = {}
    for title, folder in {"the tree": ".", **{root: root for root in ROOTS}}.items():
        key = f"duplicates: pairs in {title}"
        if command is None:
            figures[key] = "not measured"
            continue
        words = [command, "--repo", str(checkout / folder), "--most", "1", "--seconds", "300"]
        text = subprocess.run(words, capture_output=True, text=True, check=False).stdout
        found = re.match(r"(no|\d+) (?:pairs? of places|duplicates)", text)
        pairs = found[1].replace("no", "0") if found else "not measured"
        figures[key] = f"{pairs} (incomplete)" if "incomplete:" in text else pairs
    return figures


def entry_point(checkout: Path) -> str:
    """`module:function` behind the command `casemate`."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    return str(project["scripts"]["casemate"])


def environment(checkout: Path, scratch: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
    return kept | {
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_TMPDIR": str(scratch),
    }


def second_figures(checkout: Path, scratch: Path) -> Figures:
    lints = [["lint", name] for name in ("demo", *SLOWEST)]
    figures: Figures = {}
    for words in (["--help"], ["recipes"], *lints):
        times = [cpu_seconds(words, checkout, scratch) for _ in range(ROUNDS)]
        done = [seconds for seconds in times if seconds is not None]
        value = f"{statistics.median(done):.2f}" if len(done) == ROUNDS else "failed"
        figures[f"seconds: casemate {' '.join(words)}"] = value
    return figures


def cpu_seconds(words: list[str], checkout: Path, scratch: Path) -> float | None:
    """Processor time of one command; None where it fails."""
    module, _, function = entry_point(checkout).partition(":")
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=checkout,
        env=environment(checkout, scratch),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return None if process.returncode else usage.ru_utime + usage.ru_stime


def crossing_figures(checkout: Path, scratch: Path) -> tuple[Figures, list[str]]:
    """Modules and hops on the way to the first certificate, and their list."""
    out, storage = scratch / "trace.json", scratch / "storage"
    words = [str(out), str(storage), entry_point(checkout)]
    words += ["run", "demo", "--storage", str(storage)]
    words += [word for change in SHORT for word in ("--set", change)]
    done = subprocess.run(
        [sys.executable, "-P", str(TRACE), *words],
        cwd=checkout, env=environment(checkout, scratch), capture_output=True, check=False,
    )  # fmt: skip
    found: dict[str, list[str]] = json.loads(out.read_text()) if out.is_file() else {}
    if not found:
        last = done.stderr.decode().strip().splitlines()[-1:] or ["no message"]
        print(f"plumbing: casemate run demo: {last[0]}", file=sys.stderr)
        return {f"crossed: {what}": "not measured" for what in CROSSED}, []
    figures: Figures = {f"crossed: {what}": len(found[what]) for what in CROSSED}
    return figures, [entry for what in CROSSED for entry in found[what]]


def details(modules: list[Module]) -> Iterator[str]:
    """The lines and defaults behind the figures."""
    texts = {module.path: module.text.splitlines() for module in modules}
    for path, lines in kind_lines(modules).items():
        yield from (f"{path}:{number}: {texts[path][number - 1].strip()}" for number in lines)
    for entry in duplicated_defaults(modules):
        yield f"{entry.place}.{entry.name} = {entry.value}: also {', '.join(entry.others)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=Path.cwd())
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--static", action="store_true", help="leave out crossed and seconds")
    parser.add_argument("--list", action="store_true", help="also what was counted, one a line")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    modules = read_modules(checkout)
    figures = line_figures(modules) | kind_figures(modules) | default_figures(modules)
    figures |= any_figures(modules) | place_figures(modules, checkout)
    figures |= duplicate_figures(checkout)
    listing = list(details(modules))
    if not options.static:
        # A short name for Ray's sockets; Ray may still write there while it ends.
        with tempfile.TemporaryDirectory(prefix="cm-", ignore_cleanup_errors=True) as scratch:
            crossed, path = crossing_figures(checkout, Path(scratch))
            figures |= crossed | second_figures(checkout, Path(scratch))
            listing += path
    if options.json:
        print(json.dumps(figures | ({"list": listing} if options.list else {}), indent=1))
        return
    width = max(map(len, figures))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in figures.items()))
    if options.list:
        print("\n".join(["", *listing]))


if __name__ == "__main__":
    main()
