"""Fenced blocks of Markdown pages, for tests that check or follow them."""

import re
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fenced(page: Path, *languages: str, section: str = "") -> list[str]:
    """Fenced blocks in one of these languages; of one section only, or of the whole page."""
    text = page.read_text()
    if section:
        (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return [body for language, body in FENCE.findall(text) if language in languages]


def needs(block: str) -> str:
    """What a block of commands wants beyond a checkout after the demo, by its first line."""
    found = re.match(r"# needs: (.+)\n", block)
    return found[1] if found else ""
