"""`casemate manifest`: the file that runs a recipe on a cluster."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from pipelines import api
from pipelines.cli.options import JsonOpt, RecipeArg, SetOpt, SmokeOpt, StorageOpt

commands = typer.Typer()


@commands.command(
    epilog="Example: casemate manifest demo --image registry/casemate:0.1.0 --claim runs:/runs"
)
def manifest(
    recipe: RecipeArg,
    kind: Annotated[
        str | None, typer.Option(help="rayjob (default), raycluster, argo, ray-up or skypilot.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Image that holds Casemate.")] = None,
    set_: SetOpt = None,
    storage: StorageOpt = None,
    claim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:PATH", help="PersistentVolumeClaim that all pods mount."),
    ] = None,
    secret: Annotated[
        str | None, typer.Option(help="Secret whose keys become variables of all pods.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this key of the Secret; for skypilot a secret."),
    ] = None,
    node_cpus: Annotated[int | None, typer.Option(help="CPUs of a worker node.")] = None,
    node_memory: Annotated[
        int | None, typer.Option(metavar="GIB", help="Memory of a worker node.")
    ] = None,
    node_gpus: Annotated[int | None, typer.Option(help="GPUs of a worker node.")] = None,
    max_workers: Annotated[
        int | None, typer.Option(help="Worker nodes at most; default: as the recipe says, else 4.")
    ] = None,
    spot: Annotated[bool | None, typer.Option("--spot", help="Workers on spot machines.")] = None,
    spot_label: Annotated[
        str | None, typer.Option(metavar="K=V", help="Their label and taint; default: GKE's.")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Local queue of Kueue.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the job; default: the recipe's.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace of the resources.")] = None,
    deadline: Annotated[
        float | None, typer.Option(metavar="HOURS", help="End the flow after that; default 24.")
    ] = None,
    retries: Annotated[
        int | None, typer.Option(help="New clusters after a failure; default 2.")
    ] = None,
    smoke: SmokeOpt = False,
    out: Annotated[Path | None, typer.Option(help="File to write; default: stdout.")] = None,
    as_json: JsonOpt = False,
) -> None:
    """Write the file that runs a recipe on Kubernetes (KubeRay, Argo), SkyPilot or `ray up`."""
    given = locals()
    from pipelines.deploy.settings import ManifestSettings

    names = [field.name for field in fields(ManifestSettings)]
    options = {name: given[name] for name in names if given[name] is not None}
    made = api.manifest(recipe, storage=storage, overrides=set_ or [], smoke=smoke, **options)
    if out:
        made.write(out)
    if as_json:
        shown = {"kind": made.kind, "name": made.name, "file": str(out) if out else None}
        print(json.dumps({**shown, "documents": made.documents}, indent=2))
    else:
        print(f"{made.kind} {made.name}: {out}" if out else made.text, end="\n" if out else "")
