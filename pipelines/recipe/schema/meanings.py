"""What each key means: the text below a field in its settings class, inherited ones included.

pydantic reads the texts of a class's own fields; those of its bases are added here.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from components.core.settings import Settings
from pipelines.recipe.schema.base import Section
from pipelines.recipe.schema.recipe import Recipe


def described_schema() -> dict[str, Any]:
    """The JSON Schema of resolved recipes with the meaning of every key that has one."""
    schema: dict[str, Any] = Recipe.model_json_schema()
    classes = {one.__name__: one for one in (*_subclasses(Settings), *_subclasses(Section))}
    for name, written in {"Recipe": schema, **schema["$defs"]}.items():
        for base in inspect.getmro(classes[name]) if name in classes else ():
            for field, text in _texts(base).items():
                if field in written.get("properties", {}):
                    written["properties"][field].setdefault("description", text)
    return schema


def _subclasses(base: type) -> Iterator[type]:
    """All classes derived from one, of any depth."""
    derived: list[type] = base.__subclasses__()
    for one in derived:
        yield one
        yield from _subclasses(one)


def _texts(cls: type) -> dict[str, str]:
    """The text below each field that a class itself defines."""
    if cls.__module__.split(".")[0] not in ("components", "pipelines"):
        return {}
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        value = below.value if isinstance(below, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            texts[field.target.id] = inspect.cleandoc(value.value)
    return texts
