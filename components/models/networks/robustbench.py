"""Networks of the package robustbench, which must be installed where they are built.

An architecture `robustbench:DATASET/THREAT/NAME` has the option `package`: the digest of the code
of the package. Another version may compute another function from the same weights.
"""

import importlib
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import timm
from torch import nn

from components.core.code_copies import digest_of
from components.core.errors import CasemateError, first_line
from components.core.hints import did_you_mean

PREFIX = "robustbench:"
KEY = "model"
SIDES = {"cifar10": (32, 10), "cifar100": (32, 100), "imagenet": (224, 1000)}  # side, classes
THREATS = ("Linf", "L2", "corruptions")
_FORMS = (  # as users write it, and as an architecture: NAME@... looks like credentials
    re.compile(r"(?P<name>[^@/]+)(@(?P<dataset>\w+)(/(?P<threat>\w+))?)?"),
    re.compile(r"(?P<dataset>\w+)/(?P<threat>\w+)/(?P<name>[^@/]+)"),
)


class Entry(NamedTuple):
    """One network of RobustBench."""

    name: str
    dataset: str
    threat: str

    @classmethod
    def of(cls, text: str) -> "Entry":
        """The entry of `NAME[@DATASET[/THREAT]]`; by default cifar10 and Linf, as in load_model."""
        form = next(filter(None, (form.fullmatch(text) for form in _FORMS)), None)
        if form is None:
            remedy = "is not of the form robustbench:NAME@DATASET/THREAT"
            raise CasemateError(KEY, f"{PREFIX}{text}", remedy)
        entry = cls(form["name"], form["dataset"] or "cifar10", form["threat"] or "Linf")
        for value, known in ((entry.dataset, tuple(SIDES)), (entry.threat, THREATS)):
            if value not in known:
                raise CasemateError(KEY, entry, f"has {value!r}, not one of {', '.join(known)}")
        return entry

    def __str__(self) -> str:
        return f"{PREFIX}{self.dataset}/{self.threat}/{self.name}"


def is_robustbench(architecture: str) -> bool:
    """Whether an architecture is a network of RobustBench."""
    return architecture.startswith(PREFIX)


def build(entry: Entry, *, package: str) -> nn.Module:
    """The network with fresh weights; `package` is the digest of the code it was saved with."""
    if package != package_digest(entry):
        remedy = "was saved with another version of robustbench than the one installed here"
        raise CasemateError(KEY, entry, remedy)
    if timm.is_model(registered := _timm_name(entry)):
        net: nn.Module = timm.create_model(registered, num_classes=SIDES[entry.dataset][1])
        return net
    listed: nn.Module = _listed(entry)["model"]()
    return listed


def check_listed(entry: Entry) -> None:
    """Raise an error for a name that RobustBench does not have."""
    if not timm.is_model(_timm_name(entry)):
        _listed(entry)


def module(entry: Entry, name: str) -> Any:
    """A module of the package; an error if it is not installed or fails."""
    install = "pip install git+https://github.com/RobustBench/robustbench"
    if find_spec("robustbench") is None:
        remedy = f"needs the package robustbench, which is not installed here: {install}"
        raise CasemateError(KEY, entry, remedy)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        remedy = (
            f"needs the package robustbench; what is here fails to import ({first_line(error)})"
        )
        remedy += f"; {install}"
        raise CasemateError(KEY, entry, remedy) from error


def package_digest(entry: Entry) -> str:
    """Digest of the code of the installed package."""
    return _digest(Path(module(entry, "robustbench").__file__).parent)


@cache
def _digest(folder: Path) -> str:
    return digest_of(sorted(folder.rglob("*.py")), folder)


def _timm_name(entry: Entry) -> str:
    """The name under which newer networks of RobustBench are registered in timm."""
    lower = entry.name.lower().replace("-", "_")
    return f"{lower}_{entry.dataset}_{entry.threat.lower()}"


def _listed(entry: Entry) -> Any:
    """RobustBench's description of a network: what builds it, and where its weights are."""
    enums = module(entry, "robustbench.model_zoo.enums")
    zoo = module(entry, "robustbench.model_zoo").model_dicts
    models = zoo[enums.BenchmarkDataset(entry.dataset)].get(enums.ThreatModel(entry.threat), {})
    if entry.name not in models:
        names = [str(name) for name in models]
        remedy = f"is not in RobustBench: {entry.name} {did_you_mean(entry.name, names[:200])}"
        raise CasemateError(KEY, entry, remedy)
    return models[entry.name]
