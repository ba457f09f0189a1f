"""`casemate manifest`: the file that runs a recipe on a cluster."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines import api
from pipelines.cli.options import (
    Flag,
    JsonOpt,
    RecipeArg,
    SetOpt,
    SmokeOpt,
    StorageOpt,
    with_flags,
)

commands = typer.Typer()
FLAGS = {
    "kind": Flag(str, "rayjob (default), raycluster, argo, ray-up or skypilot."),
    "image": Flag(str, "Image that holds Casemate."),
    "claim": Flag(list[str], "PersistentVolumeClaim that all pods mount.", metavar="NAME:PATH"),
    "secret": Flag(str, "Secret whose keys become variables of all pods."),
    "env": Flag(list[str], "Only this key of the Secret; for skypilot a secret.", metavar="NAME"),
    "node_cpus": Flag(int, "CPUs of a worker node."),
    "node_memory": Flag(int, "Memory of a worker node.", metavar="GIB"),
    "node_gpus": Flag(int, "GPUs of a worker node."),
    "max_workers": Flag(int, "Worker nodes at most; default: as the recipe says, else 4."),
    "spot": Flag(bool, "Workers on spot machines."),
    "spot_label": Flag(str, "Their label and taint; default: GKE's.", metavar="K=V"),
    "queue": Flag(str, "Local queue of Kueue."),
    "name": Flag(str, "Of the job; default: the recipe's."),
    "namespace": Flag(str, "Namespace of the resources."),
    "deadline": Flag(float, "End the flow after that; default 24.", metavar="HOURS"),
    "retries": Flag(int, "New clusters after a failure; default 2."),
}


@commands.command(
    epilog="Example: casemate manifest demo --image registry/casemate:0.1.0 --claim runs:/runs"
)
@with_flags(FLAGS)
def manifest(
    recipe: RecipeArg,
    set_: SetOpt = None,
    storage: StorageOpt = None,
    smoke: SmokeOpt = False,
    out: Annotated[Path | None, typer.Option(help="File to write; default: stdout.")] = None,
    as_json: JsonOpt = False,
    **given: Any,
) -> None:
    """Write the file that runs a recipe on Kubernetes (KubeRay, Argo), SkyPilot or `ray up`."""
    options = {name: value for name, value in given.items() if value is not None}
    made = api.manifest(recipe, storage=storage, overrides=set_ or [], smoke=smoke, **options)
    if out:
        made.write(out)
    if as_json:
        shown = {"kind": made.kind, "name": made.name, "file": str(out) if out else None}
        print(json.dumps({**shown, "documents": made.documents}, indent=2))
    else:
        print(f"{made.kind} {made.name}: {out}" if out else made.text, end="\n" if out else "")
