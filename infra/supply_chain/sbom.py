"""`make sbom`: the packages of the runtime environment as CycloneDX JSON; equal for equal packages.

cyclonedx-py lists the environment. Packages for development, paths and dates are left out.
"""

import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "dist" / "casemate.cdx.json"  # ignored by git
PROJECT = "casemate"


def runtime_packages(project: str = PROJECT) -> set[str]:
    """The project and all that it needs here to run, by installed metadata; without extras."""
    found: dict[str, set[str]] = {}
    todo: list[tuple[str, frozenset[str]]] = [(canonicalize_name(project), frozenset())]
    while todo:
        name, extras = todo.pop()
        if name in found and extras <= found[name]:
            continue
        found.setdefault(name, set()).update(extras)
        try:
            needed = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:  # for another platform
            del found[name]
            continue
        for need in needed:
            wanted = [{"extra": extra} for extra in ("", *extras)]
            if need.marker is None or any(need.marker.evaluate(extra) for extra in wanted):
                todo.append((canonicalize_name(need.name), frozenset(need.extras)))
    return set(found)


def environment() -> dict[str, Any]:
    """What cyclonedx-py finds in the environment of this interpreter."""
    program = Path(sys.executable).with_name("cyclonedx-py")
    words = [str(program), "environment", "--output-reproducible", "--of", "JSON", sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def reduced(document: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The document with these packages alone; the project is its subject."""
    parts = [part for part in document["components"] if canonicalize_name(part["name"]) in names]
    for part in parts:  # where a package was installed from
        links = part.pop("externalReferences", [])
        if kept := [link for link in links if not link["url"].startswith("file:")]:
            part["externalReferences"] = kept
    (subject,) = [part for part in parts if part["name"] == PROJECT]
    kept_refs = {part["bom-ref"] for part in parts}
    graph = [
        {**entry, "dependsOn": [ref for ref in entry.get("dependsOn", []) if ref in kept_refs]}
        for entry in document["dependencies"]
        if entry["ref"] in kept_refs
    ]
    return {
        **document,
        "metadata": {**document["metadata"], "component": {**subject, "type": "application"}},
        "components": [part for part in parts if part is not subject],
        "dependencies": graph,
    }


def text_of(document: Mapping[str, Any]) -> str:
    """The document as JSON; an error unless it fits the schema of CycloneDX."""
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    version = SchemaVersion.from_version(document["specVersion"])
    if problem := JsonStrictValidator(version).validate_str(text):
        raise ValueError(f"not valid CycloneDX: {problem}")
    return text


def main() -> None:
    document = reduced(environment(), runtime_packages())
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(text_of(document), encoding="utf-8")
    print(f"sbom: {len(document['components'])} packages: {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
