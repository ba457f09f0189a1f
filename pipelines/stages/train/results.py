"""Files and metrics of training: progress and epochs while it runs, then figures and the model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from components.denoising.loading import is_source, source_digest
from components.models.checkpoint import read_header
from components.models.pixels import PixelModel
from components.models.pretrained import read_parent
from components.models.spec import ModelSpec
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime import progress
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.machine import MACHINE
from pipelines.runtime.notes import Notes
from pipelines.stages.train.worker import LIVE

Row = Mapping[str, float | int | None]  # figures of one epoch by name


class LiveLog:
    """Reads `live.json` of rank 0: shows progress, and logs each finished epoch once to MLflow."""

    def __init__(self, notes: Notes, out: StageDir) -> None:
        self.notes, self.out, self.num_logged = notes, out, 0
        self.device, self.num_samples = "", 0

    def __call__(self, bar: progress.Bar) -> None:
        self.notes.receive(LIVE, MACHINE)
        live = self.notes.folder / LIVE
        if not live.exists():
            return
        state = json.loads(live.read_text())
        rows = state["rows"]
        if (device := state.get("device", "")) != self.device:
            self.device = device
            self._tell_passes(state["passes"])
        for row in rows[self.num_logged :]:
            values = {f"train/{k}": v for k, v in row.items() if k != "epoch"}
            self.out.run.metrics(values, step=row["epoch"])
        self.num_logged = max(self.num_logged, len(rows))
        self._log_machine()
        bar.status.images_per_second = state["running"].get("images_per_second")
        bar.at(len(rows) + state["fraction"], progress_line(rows, state["running"]))

    def _tell_passes(self, passes: Mapping[str, Any]) -> None:
        names = ("precision", "compiled", "channels_last", "recomputed")
        tags = {f"casemate.{name}": str(passes[name]).lower() for name in names}
        self.out.run.tags({"casemate.device": self.device, **tags})
        if why := passes["why_eager"]:
            progress.say(f"{self.out.step}: goes on without compiled passes: {why}")

    def _log_machine(self) -> None:
        """Log the samples of rank 0's machine that are new."""
        path = self.notes.folder / MACHINE
        lines = (
            path.read_text().split("\n")[:-1] if path.exists() else []
        )  # the last may be cut off
        for number, line in enumerate(lines[self.num_samples :], self.num_samples):
            self.out.run.metrics(json.loads(line), step=number)
        self.num_samples = max(self.num_samples, len(lines))


def progress_line(rows: Sequence[Row], running: Row) -> str:
    """Figures of the running epoch, and validation figures of the last finished one."""
    last: Row = rows[-1] if rows else {}
    now = running if running["loss"] is not None else last
    clean = now.get("train_clean_accuracy")  # measured beside a loss on attacked images alone
    shown = {
        "loss": now.get("loss"),
        "clean": clean,
        "train": now.get("train_accuracy") if clean is None else None,
        "attacked": now.get("train_adversarial_accuracy"),
        "val": last.get("val_accuracy"),
        "robust": last.get("val_robust_accuracy"),
        "mse": last.get("val_mse"),
        "eps": now.get("eps"),
    }
    figures = [f"{key} {value:.3f}" for key, value in shown.items() if value is not None]
    if (rate := now.get("lr")) is not None:
        figures.append(f"lr {rate:.1e}")
    if speed := now.get("images_per_second") or last.get("images_per_second"):
        figures.append(f"{speed:.0f} images/s")
    return " ".join(figures) or "first epoch"


def report_start(source: str, spec: ModelSpec, out: StageDir) -> None:
    """Write which pretrained tensors were loaded to `pretrained.json`, and log it to MLflow.

    The driver loads the weights once, so that weights that do not fit show before workers start. A
    resumed training does not need them: its checkpoint has its own.
    """
    path = out.path / "pretrained.json"
    if not path.exists():
        from pipelines.stages.train.session import load_start  # with all of the training code

        report = load_start(PixelModel(spec), source)
        if is_source(source):
            parent: dict[str, Any] = {"source": source, "digest": source_digest(source)}
        else:
            parent = asdict(read_parent(source, architecture=spec.architecture))
        out.write_json(path.name, {"parent": parent, "report": report.to_dict()})
    out.run.artifacts(path)


def publish(recipe: Recipe, out: StageDir) -> None:
    """Write the final figures, and register the model in MLflow."""
    history = json.loads((out.path / "history.json").read_text())
    header = read_header(out.path / "model")
    kept = history["rows"][history["selected_epoch"]]
    final = {k: v for k, v in kept.items() if k.startswith(("val_", "train_"))}
    out.write_json("metrics.json", {"final": final, "model_digest": header["digest"]})
    out.run.tags({"casemate.model_digest": header["digest"]})
    if out.part in recipe.denoisers():  # needs noise levels besides images: cannot be served
        out.run.artifacts(*(out.path / "model").glob("model.*"))
        return
    out.run.register_model(
        out.path / "model",
        name=f"{recipe.name}-{out.part}",
        alias="candidate",
        step=history["selected_epoch"],
        metadata={"digest": header["digest"], "fingerprint": out.fingerprint},
        about=f"Model {out.part} of the recipe {recipe.name}: {_network(recipe, out)}. "
        "A version says what is known about its robustness.",
    )


def _network(recipe: Recipe, out: StageDir) -> str:
    """What was trained, in a few words."""
    section = recipe.model_of(out.part)
    objective = recipe.objective_of(out.part).kind
    return f"{section.architecture}, objective {objective}, data {recipe.data.source}"
