"""`casemate`: parsing and printing only; heavy imports live inside the commands."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from components.core.errors import CasemateError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train, tune, attack and certify vision transformers on Ray, tracked in MLflow.",
    epilog="Exit codes: 0 ok, 1 failed, 2 bad input. --verbose anywhere shows tracebacks.",
)

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
DASHBOARD = "http://127.0.0.1:8265"


def _load(name: str, overrides: list[str] | None, smoke: bool) -> Any:
    from pipelines import recipe

    return recipe.load(name, overrides=overrides or [], smoke=smoke)


def _flow(
    recipe: str,
    overrides: list[str] | None,
    storage: str | None,
    smoke: bool,
    force: bool,
    address: str | None,
    as_json: bool,
    until: str | None,
) -> None:
    """Run a flow or a part of it and print where everything is."""
    from pipelines import flow

    loaded = _load(recipe, overrides, smoke)
    steps = flow.run_flow(loaded, storage=storage, address=address, force=force, until=until)
    rows, report = flow.summary(steps), flow.folder_of(steps, "report")
    root = Path(storage or loaded.storage.root).resolve()
    uri = loaded.tracking.uri or f"sqlite:///{root}/mlflow.db"
    page = str(report / "report.html") if report else None
    if as_json:
        folders = {step.name: str(step.folder) for step in steps}
        print(
            json.dumps(
                {"report": page, "tracking_uri": uri, "steps": folders, "summary": rows}, indent=2
            )
        )
        return
    for row in rows:
        spread = f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
        percent = (
            int(1000 * row["value"]) / 10
        )  # down: a printed figure is never above the measured one
        print(
            f"{row['what']:<22} {row['model']:<10} {percent:5.1f} %  "
            f"95% {spread:<14} n={row['num_items']}"
        )
    if page:
        print(f"report: {page}")
    print(f"mlflow: mlflow ui --backend-store-uri '{uri}'")


@app.command(epilog="Example: casemate run demo --storage runs --set train.epochs=2")
def run(
    recipe: RecipeArg,
    set_: SetOpt = None,
    storage: StorageOpt = None,
    smoke: SmokeOpt = False,
    force: ForceOpt = False,
    address: AddressOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Run a recipe's whole chain; what is already finished is skipped."""
    _flow(recipe, set_, storage, smoke, force, address, as_json, None)


def _stage_command(stage: str, help_: str) -> None:
    def command(
        recipe: RecipeArg,
        set_: SetOpt = None,
        storage: StorageOpt = None,
        smoke: SmokeOpt = False,
        force: ForceOpt = False,
        address: AddressOpt = None,
        as_json: JsonOpt = False,
    ) -> None:
        _flow(recipe, set_, storage, smoke, force, address, as_json, stage)

    app.command(stage, help=help_, epilog=f"Example: casemate {stage} demo --smoke")(command)


for _stage, _help in {
    "prepare": "Prepare the recipe's dataset.",
    "train": "Train the recipe's models, preparing data first.",
    "tune": "Tune the recipe; the best one is written as best.yaml.",
    "attack": "Attack the recipe's models, training them first.",
    "certify": "Certify the recipe's models, training them first.",
    "report": "Run what the report needs, then write it.",
}.items():
    _stage_command(_stage, _help)


@app.command(epilog="Example: casemate recipes demo --set seed=1")
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one, resolved.")] = None,
    set_: SetOpt = None,
    smoke: SmokeOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """List the ready recipes, or print one with every default written out."""
    from pipelines import recipe

    if name:
        loaded = _load(name, set_, smoke)
        print(json.dumps(loaded.resolved(), indent=2) if as_json else loaded.to_yaml(), end="")
        return
    rows = {n: recipe.headline(n) for n in recipe.available()}
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        for key, text in rows.items():
            print(f"{key:<24} {text}")


@app.command(epilog="Example: casemate lint my-recipe.yaml")
def lint(recipe: RecipeArg, set_: SetOpt = None, as_json: JsonOpt = False) -> None:
    """Validate a recipe and warn about known mistakes."""
    from pipelines.lint import warnings_of

    found = warnings_of(_load(recipe, set_, False))
    if as_json:
        print(json.dumps([{"key": w.key, "message": w.message} for w in found], indent=2))
        return
    for warning in found:
        print(f"warning: {warning.key}: {warning.message}")
    print(f"{recipe}: valid, {len(found)} warning(s)")


@app.command(epilog="Example: casemate verify runs/demo/certify.l2-1f2e3d4c5b6a --resample 5")
def verify(
    path: Annotated[
        Path, typer.Argument(help="Certificate folder, certificate.json or certificates.parquet.")
    ],
    resample: Annotated[
        int, typer.Option(help="Vote again on K random items with the model, bit for bit.")
    ] = 0,
    model: Annotated[
        Path | None, typer.Option(help="Model folder; default: the one the step used.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Prepared dataset; default: the one the step used.")
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """Recompute every claim of a certificate from its votes; no GPU needed."""
    from components.certify import verify as checks

    report = checks.verify(path)
    problems = list(report.problems)
    if resample:
        from pipelines.resample import resample as vote_again

        problems += vote_again(path, count=resample, model=model, data=data)
    if as_json:
        print(
            json.dumps(
                {"num_items": report.num_items, "resampled": resample, "problems": problems},
                indent=2,
            )
        )
    else:
        for problem in problems:
            print(f"problem: {problem}")
        verdict = "every claim holds" if not problems else f"{len(problems)} problem(s)"
        again = f", {resample} items voted again" if resample else ""
        print(f"{path}: {report.num_items} items checked{again}: {verdict}")
    if problems:
        raise typer.Exit(1)


@app.command(
    epilog="Example: casemate recertify runs/demo/certify.l2-1f2e3d4c5b6a --failure-prob 0.01"
)
def recertify(
    path: Annotated[Path, typer.Argument(help="Certificate folder whose votes are used again.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the new certificate; default: PATH-recertified.")
    ] = None,
    failure_prob: Annotated[
        float | None, typer.Option(help="Failure probability per item (l2).")
    ] = None,
    radii: Annotated[str | None, typer.Option(help="Comma-separated l2 radii.")] = None,
    patch_sizes: Annotated[
        str | None, typer.Option(help="Comma-separated patch sides in pixels.")
    ] = None,
    rule: Annotated[str | None, typer.Option(help="strict, count or loc (patches).")] = None,
    as_json: JsonOpt = False,
) -> None:
    """Derive another certificate from the same votes: other sizes, radii, rule or alpha."""
    from components.certify import verify as checks

    folder = path if path.is_dir() else path.parent
    target = out or folder.with_name(f"{folder.name}-recertified")
    document = checks.recertify(
        path,
        target,
        failure_prob=failure_prob,
        rule=rule,
        radii=_numbers("--radii", radii, float),
        patch_sizes=_numbers("--patch-sizes", patch_sizes, int),
    )
    if as_json:
        print(
            json.dumps(
                {"folder": str(target), "claim": document["claim"], "summary": document["summary"]},
                indent=2,
            )
        )
        return
    for entry in document["summary"]["certified"]:
        at = entry.get("radius", entry.get("patch_size"))
        print(f"certified at {at:<8} {int(1000 * entry['accuracy']['value']) / 10:5.1f} %")
    print(f"certificate: {target}")


def _numbers(key: str, text: str | None, kind: Any) -> list[Any] | None:
    if text is None:
        return None
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise CasemateError(key, text, "is not a comma-separated list of numbers") from error


@app.command(
    epilog="Example: casemate submit demo --address http://127.0.0.1:8265 --storage /shared/runs"
)
def submit(
    recipe: RecipeArg,
    address: JobsOpt = DASHBOARD,
    set_: SetOpt = None,
    storage: StorageOpt = None,
    smoke: SmokeOpt = False,
    force: ForceOpt = False,
    python: Annotated[str | None, typer.Option(help="Interpreter on the cluster.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the flow to its end.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Send a flow to a cluster: a controller job that runs every stage as its own Ray job."""
    from pipelines.runtime import jobs

    loaded = _load(recipe, set_, smoke)
    place = storage or loaded.storage.root
    if "://" in place:
        raise CasemateError("--storage", place, "is a URL; name a folder that all nodes share")
    root = str(Path(place).resolve())
    job = jobs.submit(loaded, address=address, storage=root, force=force, python=python)
    print(
        json.dumps({"flow": job.flow, "job": job.job_id})
        if as_json
        else f"flow {job.flow}: job {job.job_id}"
    )
    if wait:
        _follow(jobs.connect(address), job.flow)


def _follow(client: Any, flow: str) -> None:
    import time

    from pipelines.runtime import jobs

    seen: dict[str, str] = {}
    while True:
        found = jobs.find_flow(client, flow)
        for job in found:
            if seen.get(job.job_id) != job.status:
                seen[job.job_id] = job.status
                print(f"{job.stage:<10} {job.status:<10} {job.job_id}", flush=True)
        last = [job for job in found if job.stage == "flow"][-1]
        if not last.active:
            if last.status != "SUCCEEDED":
                print(client.get_job_logs(last.job_id), file=sys.stderr)
                raise typer.Exit(1)
            return
        time.sleep(1)


@app.command(epilog="Example: casemate status demo-1a2b3c4d")
def status(
    flow: Annotated[str | None, typer.Argument(help="A flow; default: all.")] = None,
    address: JobsOpt = DASHBOARD,
    as_json: JsonOpt = False,
) -> None:
    """Show flows on a cluster and the state of their stages."""
    from pipelines.runtime import jobs

    client = jobs.connect(address)
    found = jobs.find_flow(client, flow) if flow else jobs.flow_jobs(client)
    if as_json:
        print(
            json.dumps(
                [{k: getattr(j, k) for k in ("flow", "stage", "job_id", "status")} for j in found],
                indent=2,
            )
        )
        return
    for job in found:
        print(f"{job.flow:<28} {job.stage:<10} {job.status:<10} {job.job_id}")


@app.command(epilog="Example: casemate logs demo-1a2b3c4d --stage certify")
def logs(
    flow: Annotated[str, typer.Argument(help="A flow or a job id.")],
    stage: Annotated[str | None, typer.Option(help="Only this stage.")] = None,
    address: JobsOpt = DASHBOARD,
) -> None:
    """Print what the jobs of a flow wrote."""
    from pipelines.runtime import jobs

    for job_id, text in jobs.logs(jobs.connect(address), flow, stage=stage):
        print(f"== {job_id}\n{text.rstrip()}")


@app.command(epilog="Example: casemate stop demo-1a2b3c4d")
def stop(
    flow: Annotated[str, typer.Argument(help="A flow or a job id.")], address: JobsOpt = DASHBOARD
) -> None:
    """Stop a flow on a cluster; finished work stays, `submit` continues it."""
    from pipelines.runtime import jobs

    stopped = jobs.stop(jobs.connect(address), flow)
    print(f"stopped {len(stopped)} job(s) of {flow}; submit the recipe again to continue")


@app.command(hidden=True)
def control() -> None:
    """The controller job of a submitted flow."""
    from pipelines import plan
    from pipelines.runtime import jobs

    loaded = _recipe_of_job()
    jobs.control(
        jobs.connect(None), loaded, plan.stages_of(loaded), lambda text: print(text, flush=True)
    )


@app.command("stage-job", hidden=True)
def stage_job(stage: str) -> None:
    """One stage of a submitted flow."""
    from pipelines import flow

    force = "--force" in os.environ.get("CASEMATE_FLAGS", "")
    flow.run_flow(_recipe_of_job(), force=force, until=stage)


def _recipe_of_job() -> Any:
    from pipelines import recipe

    return recipe.loads(os.environ["CASEMATE_RECIPE"], source="submitted recipe")


def main() -> None:
    """Entry point: one line for a user's mistake (2), one for a failure (1)."""
    verbose = "--verbose" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--verbose"]
    try:
        app()
    except CasemateError as error:
        if verbose:
            raise
        print(f"casemate: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("casemate: stopped; the same command continues where it stopped", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if verbose:
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(f"casemate: failed: {reason} (--verbose shows where)", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
