"""Images of a class, grown from noise along the gradient of each model."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from components.analyze.accumulation import accumulate, seed_images
from components.analyze.settings import AccumulationSettings
from components.analyze.states import read_arrays, to_table
from components.attacks.interface import Items
from components.core.types import Array
from components.core.units import Unit
from components.evaluate.metrics import ALL, Measurement, MetricRow, rows_of
from pipelines.stages.analyze.analysis import Analysis
from pipelines.stages.analyze.results import StudyResult
from pipelines.stages.analyze.studies.perturbations import as_bytes
from pipelines.stages.analyze.worker import AnalyzeWorker

METRICS = ("confidence", "confidence_before")


@dataclass(frozen=True, slots=True, eq=False)
class Grown:
    """The images of one model and the probabilities of their targets; one unit each."""

    content: dict[str, Array]

    def merged(self, other: "Grown") -> "Grown":
        raise ValueError("a model has one unit")

    def arrays(self) -> dict[str, Array]:
        """The content of the state."""
        return self.content


@dataclass(frozen=True, slots=True)
class AccumulationTask:
    """The images of one model."""

    model: str
    how: AccumulationSettings

    def run(self, worker: AnalyzeWorker) -> pa.Table:
        data, seed = worker.dataset, worker.config.seed
        seeds = seed_images(
            (data.channels, data.height, data.width),
            num_classes=len(data.classes),
            num_images=self.how.num_images,
            seed=seed,
        )
        x, y = seeds.x.to(worker.device), seeds.y.to(worker.device)
        with worker.ready(self.model) as model:
            found = accumulate(
                worker.fixed(model), Items(x, y, seeds.item_ids, seeds.run_seed), self.how
            )
        content = {
            "images": as_bytes(found.images),
            "confidence": found.confidence.double().cpu().numpy(),
            "confidence_before": found.confidence_before.double().cpu().numpy(),
        }
        return to_table({"grown": Grown(content)})


def analyze(analysis: Analysis) -> StudyResult:
    """The images of all models from the same noise."""
    how: AccumulationSettings = analysis.how
    data = analysis.dataset
    seeds = seed_images(
        (data.channels, data.height, data.width),
        num_classes=len(data.classes),
        num_images=how.num_images,
        seed=analysis.seed,
    )
    units = [
        Unit(
            f"accumulation-{model}",
            f"{model}, {how.num_images} images",
            AccumulationTask(model, how),
            how.num_images,
        )
        for model in analysis.analyzed
    ]
    arrays: dict[str, Array] = {"pictures/seeds.npy": as_bytes(seeds.x)}
    rows: list[MetricRow] = []
    confidence: dict[str, list[float]] = {}
    for model, table in zip(analysis.analyzed, analysis.tables(units), strict=True):
        found = read_arrays(table)["grown"]
        arrays[f"pictures/{model}.npy"] = found["images"]
        confidence[model] = [float(value) for value in found["confidence"]]
        numbers = [
            Measurement(item=ALL, metric=name, value=float(np.mean(found[name])), n=how.num_images)
            for name in METRICS
        ]
        rows += rows_of(analysis.subject(model), analysis.study, numbers)
    return StudyResult(
        rows=rows,
        num_items=how.num_images,
        arrays=arrays,
        details={"targets": seeds.y.tolist(), "confidence": confidence},
    )
