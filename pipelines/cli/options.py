"""Arguments and options that several commands share."""

from typing import Annotated

import typer

RecipeArg = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A ready recipe's name or a YAML path.")
]
SetOpt = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="K=V", help="Override a key, e.g. train.epochs=2."),
]
StorageOpt = Annotated[
    str | None, typer.Option("--storage", metavar="DIR", help="Where artifacts are kept.")
]
SmokeOpt = Annotated[bool, typer.Option("--smoke", help="Shrink the recipe to seconds.")]
ForceOpt = Annotated[bool, typer.Option("--force", help="Run finished steps again.")]
AddressOpt = Annotated[
    str | None, typer.Option("--address", metavar="A", help="Ray cluster, host:port.")
]
JobsOpt = Annotated[str, typer.Option("--address", metavar="URL", help="Dashboard of the cluster.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Results as JSON on stdout.")]
