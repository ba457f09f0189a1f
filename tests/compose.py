"""Reads infra/mlflow/compose.yaml as `docker compose` does, for tests on machines without it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "infra" / "mlflow"
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def variables(path: Path) -> dict[str, str]:
    """Variables of an .env file."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def interpolated(text: str, values: Mapping[str, str]) -> str:
    """The text with ${NAME}, ${NAME:-default} and ${NAME:?message} replaced."""

    def value(found: re.Match[str]) -> str:
        name, operator, word = found.groups()
        if given := values.get(name):
            return given
        if operator == "-":
            return str(word)
        raise KeyError(f"{name} {word or 'is not set'}")

    return VARIABLE.sub(value, text)


def services(values: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The services of the compose file, with these variables."""
    text = interpolated((FOLDER / "compose.yaml").read_text(), values)
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found
