"""The reference of `pipelines.api`, from its signatures and docstrings."""

import dataclasses
import inspect
from typing import Any

from pipelines import api

INTRODUCTION = """\
# Python API

`from pipelines import api`: what the commands do, for notebooks and scripts. Images are
(N, C, H, W) pixels in [0, 1], or uint8. Attacks, suites, studies and certificates are computed in
this process; `api.run` runs whole recipes on Ray.
"""


def api_page() -> str:
    """Functions first, then what they return."""
    public = {name: getattr(api, name) for name in api.__all__}
    functions = {name: thing for name, thing in public.items() if inspect.isfunction(thing)}
    classes = {name: thing for name, thing in public.items() if inspect.isclass(thing)}
    chapters = [_function(name, thing) for name, thing in sorted(functions.items())]
    results = [_class(name, thing) for name, thing in sorted(classes.items())]
    return "\n".join([INTRODUCTION, *chapters, "## Results\n", *results]).rstrip("\n") + "\n"


def _function(name: str, thing: Any) -> str:
    """Signature and docstring."""
    return f"## {name}\n\n```text\n{_signature(f'api.{name}', thing)}\n```\n\n{_text(thing)}\n"


def _class(name: str, thing: Any) -> str:
    """Fields and methods of a result."""
    lines = [f"### {name}", "", _text(thing), ""]
    if dataclasses.is_dataclass(thing):
        lines += [f"- `{field.name}: {_type(field.type)}`" for field in dataclasses.fields(thing)]
    for member, value in vars(thing).items():
        if not member.startswith("_") and (
            inspect.isfunction(value) or isinstance(value, property)
        ):
            shown = f"{member}" if isinstance(value, property) else _signature(member, value)
            first = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
            lines.append(f"- `{' '.join(shown.split())}`: {first}".removesuffix(": "))
    return "\n".join(lines) + "\n"


def _signature(name: str, thing: Any) -> str:
    """A call with one argument per line where it is long."""
    found = inspect.signature(thing)
    parameters = [p for p in found.parameters.values() if p.name != "self"]
    words, kinds = [_parameter(p) for p in parameters], [p.kind for p in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        words.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    annotation = found.return_annotation
    returned = "" if annotation is found.empty else f" -> {_type(annotation)}"
    line = f"{name}({', '.join(words)}){returned}"
    if len(line) <= 100:
        return line
    return f"{name}(\n    " + ",\n    ".join(words) + f",\n){returned}"


def _parameter(parameter: inspect.Parameter) -> str:
    """A parameter with its type and default."""
    bare = parameter.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty)
    text = str(bare)
    if parameter.annotation is not parameter.empty:
        text += f": {_type(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        plain = not callable(parameter.default)
        text += f" = {parameter.default!r}" if plain else " = ..."
    return text


def _type(annotation: Any) -> str:
    """A type as it is written, without the modules."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    for prefix in ("collections.abc.", "typing.", "pathlib.", "components.", "pipelines.api."):
        text = text.replace(prefix, "")
    return text


def _text(thing: Any) -> str:
    """The docstring; its examples, which are run by a test, as code."""
    out: list[str] = []
    for block in (inspect.getdoc(thing) or "").split("\n\n"):
        example = block.startswith(("    ", ">>>"))
        code = "```python\n" + inspect.cleandoc(block) + "\n```"
        out.append(code if example else " ".join(block.split()))
    return "\n\n".join(out)
