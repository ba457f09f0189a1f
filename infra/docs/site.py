"""Builds the pages as a site, offline: `make docs`.

Pages are copied to `build/docs` with the files that they link to, under their paths, so that links
are those of the repository. The builder is Zensical, or the one named: `site.py mkdocs`.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("components", "pipelines", "tests", "notebooks", "infra")
CONFIG = ROOT / "infra" / "docs" / "mkdocs.yml"
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")


def pages() -> list[Path]:
    """Every Markdown page of the repository."""
    inner = (page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))
    return sorted([*ROOT.glob("*.md"), *inner])


def linked(page: Path) -> Iterator[Path]:
    """Files that a page links to; a folder stands for its page."""
    for target in LINK.findall(page.read_text()):
        found = (page.parent / target).resolve()
        if "://" not in target and found.is_file() and found.suffix != ".md":
            yield found


def gather(docs: Path) -> None:
    """Pages and what they link to."""
    shutil.rmtree(docs, ignore_errors=True)
    for page in pages():
        for file in (page, *linked(page)):
            place = docs / file.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)


def build(folder: Path, builder: str = "zensical") -> None:
    """Gather, then build `site/`; a warning of the builder is an error."""
    gather(folder / "docs")
    config = Path(shutil.copy(CONFIG, folder))  # a site lies beside its configuration
    program = Path(sys.executable).with_name(builder)
    command = [str(program), "build", "--strict", "--clean", "--config-file", config.name]
    subprocess.run(command, cwd=folder, check=True)


if __name__ == "__main__":
    build(ROOT / "build", *sys.argv[1:])
    sys.stdout.write("docs: build/site/index.html\n")
