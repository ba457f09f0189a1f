"""The file of one kind for a flow: its documents and their text."""

from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from components.core.errors import CasemateError
from components.core.hints import did_you_mean
from components.core.settings import Problem, SettingError
from pipelines.deploy import rules
from pipelines.deploy.flow import Flow, unmounted
from pipelines.deploy.settings import ManifestSettings, unused
from pipelines.deploy.text import Document, to_text, without_notes


@dataclass(frozen=True, slots=True)
class Manifest:
    """A file for a cluster."""

    kind: str
    name: str  # of the job or cluster
    text: str
    documents: list[Document]

    def write(self, path: str | Path) -> Path:
        """Write the file; what was there is replaced."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.text, encoding="utf-8")
        except OSError as error:
            remedy = f"cannot be written ({error.strerror}); choose another file"
            raise CasemateError("--out", path, remedy) from error
        return path


def settings_of(options: dict[str, Any]) -> ManifestSettings:
    """Settings from options; a wrong one is named by its flag."""
    known = [field.name for field in fields(ManifestSettings)]
    for name in options:
        if name not in known:
            raise CasemateError(_flag(name), "", did_you_mean(name, known))
    try:
        made = ManifestSettings(**options)
    except SettingError as error:
        raise _refusal(error.problems[0]) from error
    for problem in unused(made, options):
        raise _refusal(problem)
    return made


def _refusal(problem: Problem) -> CasemateError:
    return CasemateError(_flag(problem.field), problem.value, problem.remedy)


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def manifest_of(flow: Flow) -> Manifest:
    """The file of a flow; one that breaks a rule of the operator is refused."""
    kind = flow.settings.kind
    module = _module(kind)
    documents: list[Document] = module.documents(flow)
    if broken := rules.problems(documents):
        raise CasemateError("manifest", kind, f"would be refused by its operator: {broken[0]}")
    about = f"Flow {flow.recipe.name} as {kind}, written by: casemate manifest"
    header = [about, *module.header(flow), *unmounted(flow)]
    text = to_text(documents, header=header)
    return Manifest(kind, flow.name, text, [without_notes(d) for d in documents])


def _module(kind: str) -> ModuleType:
    return import_module(f"pipelines.deploy.{kind.replace('-', '_')}")
