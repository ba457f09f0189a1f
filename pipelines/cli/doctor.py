"""`casemate doctor`: what will go wrong on a cluster, in a minute."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from pipelines import api
from pipelines.cli.jobs import EnvOpt, in_job, recipe_of_job
from pipelines.cli.options import JsonOpt, SetOpt, SmokeOpt, StorageOpt
from pipelines.runtime.node_probe import ANSWER_SECONDS

commands = typer.Typer()
TimeoutOpt = Annotated[
    float, typer.Option(min=1, metavar="S", help="Seconds for the answer of a machine.")
]
AddressOpt = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="A",
        help="Ray cluster, host:port from one of its machines, or http://host:port of its "
        "dashboard from anywhere; default: this machine.",
    ),
]


@commands.command(
    epilog="Example: casemate doctor --address http://10.0.0.5:8265 --storage /shared/runs"
)
def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Also check what this recipe needs.")
    ] = None,
    address: AddressOpt = None,
    set_: SetOpt = None,
    storage: StorageOpt = None,
    smoke: SmokeOpt = False,
    env: EnvOpt = None,
    python: Annotated[str | None, typer.Option(help="Interpreter on the cluster.")] = None,
    timeout: TimeoutOpt = ANSWER_SECONDS,
    as_json: JsonOpt = False,
) -> None:
    """Check every node: versions, code, GPUs, storage, clock, disk, memory; and MLflow."""
    found = []
    for finding in api.doctor(
        recipe,
        address=address,
        overrides=set_ or [],
        storage=storage,
        smoke=smoke,
        env=env or [],
        python=python,
        timeout=timeout,
    ):
        found.append(finding)
        if not as_json:
            print(finding, flush=True)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    if any(finding.status == "FAIL" for finding in found):
        raise typer.Exit(1)


@commands.command("doctor-job", hidden=True)
def doctor_job(timeout: TimeoutOpt = ANSWER_SECONDS) -> None:
    """The checks inside a job of the cluster."""

    def work() -> None:
        from pipelines.runtime.doctor import diagnose
        from pipelines.runtime.doctor_job import FINDING

        for finding in diagnose(recipe_of_job(), timeout=timeout):
            print(f"{FINDING}{json.dumps(asdict(finding))}", flush=True)

    in_job(work)
