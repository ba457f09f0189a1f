"""Arguments and options that several commands share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from components.core.errors import CasemateError

Command = Callable[..., None]
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def _ready_recipes(begun: str) -> list[str]:
    """Names that a shell may complete."""
    from pipelines.recipe.load import available

    return [name for name in available() if name.startswith(begun)]


_recipe = typer.Argument(
    metavar="RECIPE",
    help="A ready recipe's name or a YAML path.",
    autocompletion=_ready_recipes,
)
RecipeArg = Annotated[str, _recipe]
NoRecipeArg = Annotated[str | None, _recipe]  # of commands that take any model instead, too
DataOpt = Annotated[
    str | None, typer.Option(metavar="DIR|SOURCE", help="Prepared dataset, or a source.")
]
DataPathOpt = Annotated[
    str | None, typer.Option(metavar="P", help="Files of the source, if it needs any.")
]
ModelOpt = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Model, without a recipe: its folder, timm:NAME, hf:ORG/NAME, robustbench:NAME, "
        "python:FILE.py:FACTORY, a .pt2 or TorchScript file.",
    ),
]
WeightsOpt = Annotated[
    str | None, typer.Option(metavar="FILE", help="State dict of the network of a FACTORY.")
]
ImageSizeOpt = Annotated[
    int | None, typer.Option(help="Side of the model's images; default: as it says, or the data's.")
]
ChannelsOpt = Annotated[int | None, typer.Option(help="Channels of the images; the same default.")]
NumClassesOpt = Annotated[
    int | None, typer.Option(help="Classes of a FACTORY; default: the data's.")
]
MeanOpt = Annotated[
    str | None, typer.Option(help="Comma-separated, per channel, if the model does not say it.")
]
StdOpt = Annotated[str | None, typer.Option(help="The same; default: pixels in [0, 1].")]
FitOpt = Annotated[
    str | None, typer.Option(help="pad, resize, crop or squash a source's images; default: pad.")
]
NumItemsOpt = Annotated[
    int | None, typer.Option(help="Number of test items, at least 1; default: all.")
]
SetOpt = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="K=V", help="Override a key, e.g. train.epochs=2."),
]
StorageOpt = Annotated[
    str | None, typer.Option("--storage", metavar="DIR|URI", help="Where artifacts are kept.")
]
SmokeOpt = Annotated[bool, typer.Option("--smoke", help="Shrink the recipe to seconds.")]
ForceOpt = Annotated[bool, typer.Option("--force", help="Run finished steps again.")]
AddressOpt = Annotated[
    str | None, typer.Option("--address", metavar="A", help="Ray cluster, host:port.")
]
JobsOpt = Annotated[str, typer.Option("--address", metavar="URL", help="Dashboard of the cluster.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Results as JSON on stdout.")]
CertificateArg = Annotated[str, typer.Argument(help="Certificate folder, or its URI.")]
NamesOpt = Annotated[
    str | None,
    typer.Option("--model", metavar="A,B", help="Models of flows by name; default: all."),
]
StoragesOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--storage", metavar="DIR|URI", help="Where results are searched; may be given again."
    ),
]
TrackingOpt = Annotated[
    str | None, typer.Option(metavar="URI", help="MLflow's store, for its models and runs.")
]
SuspectOpt = Annotated[
    bool, typer.Option("--allow-suspect", help="Count attacks whose sanity checks failed.")
]
PublicKeyOpt = Annotated[
    Path | None,
    typer.Option(help="Public ed25519 key (PEM or OpenSSH) that must have signed certificates."),
]


class Flag(NamedTuple):
    """An option that a command finds in its `**given` and passes on; None if it was left out."""

    kind: Any
    help: str
    metavar: str | None = None
    min: float | None = None

    def parameter(self, name: str) -> Parameter:
        names = [flag(name)] if self.kind is bool else []  # without one, typer adds --no-NAME
        option = typer.Option(*names, help=self.help, metavar=self.metavar, min=self.min)
        kind: Any = self.kind | None
        hint = Annotated[kind, option]
        return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=hint)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A recipe with the options of all commands that run one."""

    recipe: RecipeArg
    set_: SetOpt = None
    storage: StorageOpt = None
    smoke: SmokeOpt = False
    force: ForceOpt = False


def takes_recipe(command: Command) -> Command:
    """`command`, whose first parameter is `chosen`, with the options of `Chosen` instead."""
    names = [field.name for field in fields(Chosen)]

    @wraps(command)
    def called(**given: Any) -> None:
        command(Chosen(**{name: given.pop(name) for name in names}), **given)

    _, *own = signature(command).parameters.values()
    return with_parameters(called, [*signature(Chosen).parameters.values(), *own])


def with_flags(flags: Mapping[str, Flag]) -> Callable[[AnyFunction], AnyFunction]:
    """A command that takes `**given`, with these options before its last parameter."""

    def changed(command: AnyFunction) -> AnyFunction:
        parameters = signature(command).parameters.values()
        *before, last = [p for p in parameters if p.kind is not Parameter.VAR_KEYWORD]
        added = [one.parameter(name) for name, one in flags.items()]
        return with_parameters(command, [*before, *added, last])

    return changed


def flag(key: str) -> str:
    """The option of a field."""
    return "--" + key.replace("_", "-")


def names_in(text: str | None) -> list[str]:
    """The names of a comma-separated list."""
    return [name.strip() for name in text.split(",")] if text else []


def numbers(key: str, text: str | None) -> tuple[float, ...] | None:
    """The numbers of a comma-separated list."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise CasemateError(key, text, "is not a comma-separated list of numbers") from error


def with_parameters(command: AnyFunction, parameters: Sequence[Parameter]) -> AnyFunction:
    """`command` with these parameters on the command line."""
    shown = signature(command).replace(parameters=parameters)
    command.__signature__ = shown  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return command
