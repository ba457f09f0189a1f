"""Results of attacks on one model, item by item, and the files they are written to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from components.attacks.cascade import CascadeState, Outcome, after_attack, before_attacks
from components.attacks.listing import ListedAttack
from components.attacks.passes import AttackPasses
from components.attacks.scales import Scales
from components.core.arithmetic import EXACT
from components.core.files import atomic
from components.core.statistics import exact_accuracy
from components.core.threats import UNIT
from components.data.prepared import PreparedDataset
from pipelines.recipe.schema.attack import AttackSection
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.attack.documents import (
    Accuracy,
    AttackSummary,
    Costs,
    ModelSummary,
    ProtocolSummary,
)
from pipelines.stages.attack.worker import NUM_EXAMPLES

OUTCOME = (
    *("clean_prediction", "adversarial_prediction"),
    *("num_evaluations", "num_gradients", "num_zero_gradients"),
)


@dataclass
class ModelUnderAttack:
    """One model under attack: its robust items, and results for the broken ones."""

    model: str
    item_ids: list[str]
    state: CascadeState
    norms: list[float | None]  # of the perturbations that broke items
    margins: list[float]  # of logits at the best points
    images: dict[int, bytes] = field(default_factory=dict)  # of the first and first broken items
    attacks: list[AttackSummary] = field(default_factory=list)  # finished
    protocols: dict[str, ProtocolSummary] = field(default_factory=dict)  # of scaled attacks

    @staticmethod
    def before(model: str, table: pa.Table) -> "ModelUnderAttack":
        """From the predictions on clean items."""
        labels, predictions = (_tensor(table, name) for name in ("label", "clean_prediction"))
        state = before_attacks(labels, predictions)
        ids, margins = table["item_id"].to_pylist(), table["margin"].to_pylist()
        return ModelUnderAttack(model, ids, state, [None] * len(labels), margins)

    @property
    def robust_items(self) -> list[int]:
        """Indices of the items that the next attack is given."""
        rows: list[int] = self.state.robust_rows.tolist()
        return rows

    def record(self, listed: ListedAttack, table: pa.Table, scales: Sequence[Scales]) -> None:
        """Add the results of one attack on the robust items, one row each."""
        if table["place"].to_pylist() != self.robust_items:
            raise ValueError(f"{listed.name}: the parts of {self.model} are about other items")
        outcome = Outcome(*(_tensor(table, name) for name in OUTCOME))
        self.state = after_attack(self.state, listed.name, outcome)
        robust = self.state.robust.tolist()
        for row in table.select(["place", "norm", "margin", "image"]).to_pylist():
            place, broken = row["place"], not robust[row["place"]]
            if broken:
                self.norms[place] = row["norm"]
            if broken or row["margin"] > self.margins[place]:
                self.margins[place] = row["margin"]
                if row["image"] is not None:
                    self.images[place] = row["image"]
        self.attacks.append(_attack_summary(self.state, listed, outcome))
        if listed.scaling:
            self.protocols[listed.name] = _protocol(table, scales)

    def skip(self, listed: ListedAttack) -> None:
        """Add an attack without items: none is robust any more."""
        none = Outcome(*[torch.empty(0, dtype=torch.int64)] * len(OUTCOME))
        self.state = after_attack(self.state, listed.name, none)
        self.attacks.append(_attack_summary(self.state, listed, none))

    def summary(self) -> ModelSummary:
        """The results of the attack list."""
        clean, costs = self.state.clean_prediction == self.state.y, _costs(self.state)
        summary: ModelSummary = {
            "num_items": len(self.state.y),
            "clean_accuracy": exact_accuracy(clean.numpy()),
            "robust_accuracy": exact_accuracy(self.state.robust.numpy()),
            "attacks": self.attacks,
            "num_evaluations": costs["num_evaluations"],
            "num_gradients": costs["num_gradients"],
            "zero_gradient_rate": costs["zero_gradient_rate"],
        }
        if self.protocols:
            summary["paper_protocol"] = self.protocols
        return summary

    def accuracy_of(self, table: pa.Table) -> Accuracy:
        """Accuracy on the first items under a single attack, whose rows `table` holds."""
        predictions = _tensor(table, "adversarial_prediction")
        return exact_accuracy((predictions == self.state.y[: len(predictions)]).numpy())


def _attack_summary(state: CascadeState, listed: ListedAttack, outcome: Outcome) -> AttackSummary:
    tally = state.tallies[-1]
    return {
        "name": listed.name,
        "entry": listed.entry,
        "num_items": tally.num_rows,
        "num_broken": tally.num_broken,
        "robust_accuracy": exact_accuracy(state.robust.numpy()),
        **_costs(outcome),
    }


def _costs(counted: Outcome | CascadeState) -> Costs:
    num_gradients = int(counted.num_gradients.sum())
    zero = int(counted.num_zero_gradients.sum())
    return {
        "num_evaluations": int(counted.num_evaluations.sum()),
        "num_gradients": num_gradients,
        "zero_gradient_rate": zero / num_gradients if num_gradients else 0.0,
    }


def _protocol(table: pa.Table, scales: Sequence[Scales]) -> ProtocolSummary:
    """Accuracies of the rescaled networks, apart from the model's own; S = 1 comes first.

    They are about the items that this attack was given: to compare with published tables, put it
    first in the list.
    """
    original, scaled, clean = (
        np.array(table[column].to_pylist())
        for column in ("original_correct", "scaled_correct", "scaled_clean_correct")
    )
    return {
        "num_items": table.num_rows,
        "candidates": [
            {
                "scales": None if i == 0 else list(scales[i - 1]),
                "original_accuracy": exact_accuracy(original[:, i]),  # the model itself
                "scaled_accuracy": exact_accuracy(scaled[:, i]),
                "scaled_clean_accuracy": exact_accuracy(clean[:, i]),
            }
            for i in range(len(scales) + 1)
        ],
        "scaled_union_accuracy": exact_accuracy(
            np.array(table["scaled_union_correct"].to_pylist())
        ),
        "restarts_accuracy": exact_accuracy(np.array(table["restarts_correct"].to_pylist())),
    }


def write_rows(out: StageDir, models: Sequence[ModelUnderAttack]) -> None:
    """`attacks.parquet`: one row per model and item."""
    tables = []
    for own in models:
        s = own.state
        rate = s.num_zero_gradients.double() / s.num_gradients.clamp(min=1)
        tables.append(
            pa.table(
                {
                    "model": [own.model] * len(s.y),
                    "item_id": own.item_ids,
                    "label": pa.array(s.y.tolist(), pa.int32()),
                    "clean_prediction": pa.array(s.clean_prediction.tolist(), pa.int32()),
                    "adversarial_prediction": pa.array(
                        s.adversarial_prediction.tolist(), pa.int32()
                    ),
                    "broken_by": pa.array(s.breaker_names(), pa.string()),
                    "num_evaluations": s.num_evaluations.tolist(),
                    "num_gradients": s.num_gradients.tolist(),
                    "zero_gradient_rate": rate.tolist(),
                    "norm": pa.array(own.norms, pa.float64()),
                }
            )
        )
    with atomic(out.path / "attacks.parquet") as temporary:
        pq.write_table(pa.concat_tables(tables), temporary)


def write_summary(
    out: StageDir,
    section: AttackSection,
    listed: Sequence[ListedAttack],
    summaries: Mapping[str, ModelSummary],
    *,
    devices: Sequence[str],
    passes: AttackPasses | None,
) -> None:
    """`summary.json`, metrics and tags; devices other than the CPU are named, and `passes`."""
    threat = {"kind": section.norm, "unit": UNIT, "eps": section.eps}
    if passes and passes.precision != "float32":  # of another function than the float32 model
        threat["precision"] = passes.precision
    others = [device for device in devices if device != "cpu"]
    switches = passes.arithmetic if passes else EXACT
    out.write_json(
        "summary.json",
        {
            "threat": threat,
            "attacks": [attack.name for attack in listed],
            "settings": section.model_dump(mode="json"),
            "models": summaries,
            **({"devices": list(devices), "float32": switches.to_dict()} if others else {}),
            **({"passes": passes.to_dict()} if passes else {}),
        },
    )
    precision = {"casemate.precision": passes.precision} if passes else {}
    out.run.tags({"casemate.device": ", ".join(devices), **precision})
    _track(out, section, summaries)
    out.run.artifacts(out.path / "attacks.parquet", out.path / "summary.json")


def _track(out: StageDir, section: AttackSection, summaries: Mapping[str, ModelSummary]) -> None:
    """Accuracies as metrics, the verdict as tags: `suspect` if that of any model is."""
    for model, summary in summaries.items():
        out.run.metrics(
            _metrics(summary, prefix=f"attack/{out.part}/{model}"), trained_in=out.trained_in(model)
        )
        _track_model(out, section, model, summary)
    verdicts = {model: own["sanity"] for model, own in summaries.items() if "sanity" in own}
    if verdicts:
        labels = {found["verdict"] for found in verdicts.values()}
        label = next(one for one in ("suspect", "unchecked", "reliable") if one in labels)
        reasons = [f"{m}: {reason}" for m, found in verdicts.items() for reason in found["reasons"]]
        tag = f"casemate.attack.{out.part}"
        out.run.tags(
            {
                f"{tag}.verdict": label,
                f"{tag}.reasons": "; ".join(reasons)[:5000] or "none",
            }
        )


def _metrics(summary: ModelSummary, *, prefix: str) -> dict[str, float]:
    """The accuracies of one model by metric name."""
    values = {
        f"{prefix}/clean_accuracy": summary["clean_accuracy"]["value"],
        f"{prefix}/robust_accuracy": summary["robust_accuracy"]["value"],
    }
    for attack in summary["attacks"]:
        values[f"{prefix}/after_{attack['name']}"] = attack["robust_accuracy"]["value"]
    for name, protocol in summary.get("paper_protocol", {}).items():
        for i, candidate in enumerate(protocol["candidates"]):
            key = f"{prefix}/paper_protocol/{name}/{i}"
            values[f"{key}/scaled_accuracy"] = candidate["scaled_accuracy"]["value"]
            values[f"{key}/scaled_clean_accuracy"] = candidate["scaled_clean_accuracy"]["value"]
    return values


def _track_model(out: StageDir, section: AttackSection, model: str, summary: ModelSummary) -> None:
    """The same accuracies under names that all models share, to rank them; tags of its version."""
    metrics = {
        f"attack/{out.part}/{name}": accuracy["value"]
        for name, accuracy in (
            ("clean_accuracy", summary["clean_accuracy"]),
            ("robust_accuracy", summary["robust_accuracy"]),
        )
    }
    verdict = summary["sanity"]["verdict"] if "sanity" in summary else "unchecked"
    budget = "" if section.eps is None else f" {section.eps:g}"  # patches and poses have no radius
    tags = {
        f"robustness.threat.{out.part}": f"{section.norm}{budget}",
        f"robustness.verdict.{out.part}": verdict,
    }
    out.run.model_results(out.trained_in(model), metrics=metrics, tags=tags)


def write_examples(
    out: StageDir, models: Sequence[ModelUnderAttack], dataset: PreparedDataset
) -> None:
    """A few clean and adversarial images of each model, as arrays."""
    split = dataset.load("test", limit=min(NUM_EXAMPLES, len(models[0].item_ids)))
    clean = split.pixels().numpy()
    arrays: dict[str, Any] = {}
    for own in models:
        arrays[f"{own.model}/clean"] = clean
        arrays[f"{own.model}/adversarial"] = np.stack(
            [
                np.frombuffer(own.images[place], np.float32).reshape(image.shape)
                if place in own.images  # else the image itself is the best point
                else image
                for place, image in enumerate(clean)
            ]
        )
        arrays[f"{own.model}/label"] = split.labels.numpy()
        for name in ("clean_prediction", "adversarial_prediction"):
            values = getattr(own.state, name)[: len(clean)]
            arrays[f"{own.model}/{name}"] = values.numpy()
        arrays |= {f"{own.model}/broken/{key}": a for key, a in _broken(own, dataset).items()}
    with atomic(out.path / "examples.npz") as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _broken(own: ModelUnderAttack, dataset: PreparedDataset) -> dict[str, Any]:
    """The first broken items, clean and as they were broken; {} where none was broken.

    Every unit keeps the first items that it broke, so these are the first of all.
    """
    state = own.state
    fell = (state.clean_prediction == state.y) & ~state.robust
    places = [place for place in fell.nonzero().flatten().tolist() if place in own.images]
    rows = torch.tensor(places[:NUM_EXAMPLES], dtype=torch.int64)
    if not len(rows):
        return {}
    clean = dataset.on_demand("test").rows(rows).pixels().numpy()
    found = [np.frombuffer(own.images[place], np.float32) for place in rows.tolist()]
    return {
        "clean": clean,
        "adversarial": np.stack(found).reshape(clean.shape),
        "label": state.y[rows].numpy(),
        "clean_prediction": state.clean_prediction[rows].numpy(),
        "adversarial_prediction": state.adversarial_prediction[rows].numpy(),
    }


def _tensor(table: pa.Table, name: str) -> torch.Tensor:
    return torch.from_numpy(table[name].to_numpy().copy())
