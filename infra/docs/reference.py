"""Writes the pages that are generated from the code: `python -m infra.docs.reference`."""

from pathlib import Path

from infra.docs.api_page import api_page
from infra.docs.command_page import command_page
from infra.docs.recipe_page import recipe_page

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "pipelines" / "reference"
PAGES = {"api.md": api_page, "commands.md": command_page, "recipe.md": recipe_page}


def write(folder: Path = FOLDER) -> None:
    """All pages anew."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page())


if __name__ == "__main__":
    write()
