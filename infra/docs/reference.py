"""Writes the pages that are generated from the code: `python -m infra.docs.reference`."""

from pathlib import Path

from infra.docs.api_page import api_page
from infra.docs.command_page import command_page
from infra.docs.gallery_page import gallery_page
from infra.docs.recipe_page import recipe_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "notebooks/gallery.md": gallery_page,
    "pipelines/reference/api.md": api_page,
    "pipelines/reference/commands.md": command_page,
    "pipelines/reference/recipe.md": recipe_page,
}


def write(root: Path = ROOT) -> None:
    """All pages anew."""
    for name, page in PAGES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(page())


if __name__ == "__main__":
    write()
