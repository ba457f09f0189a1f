"""Names of timm's networks without importing timm, which takes seconds."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_REGISTERED = re.compile(r"^@register_model\s*\ndef (\w+)\(", re.MULTILINE)


@cache
def _names() -> frozenset[str]:
    spec = find_spec("timm")  # find_spec of a top-level package does not import it
    folders = spec.submodule_search_locations if spec else None
    files = [path for folder in folders or () for path in Path(folder, "models").glob("*.py")]
    return frozenset(
        name for path in files for name in _REGISTERED.findall(path.read_text(encoding="utf-8"))
    )


def is_registered(architecture: str) -> bool:
    """Whether timm has a network of that name; if False, `zoo.check_known` decides."""
    return architecture in _names()
