"""JUnit XML, as CI systems read it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from components.core.errors import CasemateError
from components.core.files import write_atomic

NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Case(NamedTuple):
    """A test case; `failure` is empty if it passed."""

    group: str
    name: str
    failure: str
    output: str


def write_junit(path: Path, suite: str, cases: Sequence[Case]) -> None:
    """Write the cases as one suite."""
    failures = sum(bool(case.failure) for case in cases)
    counts = {"tests": str(len(cases)), "failures": str(failures), "errors": "0", "skipped": "0"}
    root = ElementTree.Element("testsuites", {"name": suite, **counts})
    inner = ElementTree.SubElement(root, "testsuite", {"name": suite, **counts})
    for case in cases:
        names = {"classname": _clean(case.group), "name": _clean(case.name)}
        element = ElementTree.SubElement(inner, "testcase", names)
        if case.failure:
            failure = {"message": _clean(case.failure), "type": "minimum"}
            ElementTree.SubElement(element, "failure", failure).text = _clean(case.output)
        else:
            ElementTree.SubElement(element, "system-out").text = _clean(case.output)
    ElementTree.indent(root)
    content = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    try:
        write_atomic(path, content + b"\n")
    except OSError as error:
        raise CasemateError("--junit", path, f"cannot be written ({error.strerror})") from error


def _clean(text: str) -> str:
    """Text without characters that XML cannot hold."""
    return NOT_XML.sub("?", text)
