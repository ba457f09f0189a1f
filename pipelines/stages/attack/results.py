"""What attacks did to one model, item by item, and the files that say so."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from components.attacks.cascade import Outcome, Standing, after_attack, before_attacks
from components.attacks.scales import Scales
from components.core.files import atomic
from components.core.threats import UNIT
from components.data.prepared import PreparedDataset
from components.evaluate.accuracy import accuracy
from pipelines.recipe.build import ListedAttack
from pipelines.recipe.schema.attack import AttackSection
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.attack.worker import NUM_EXAMPLES

OUTCOME = (
    *("clean_prediction", "adversarial_prediction"),
    *("num_evaluations", "num_gradients", "num_zero_gradients"),
)


@dataclass
class Victim:
    """One model under attack: who stands, and what is kept of those who fell."""

    model: str
    item_ids: list[str]
    standing: Standing
    norms: list[float | None]  # of the points that broke items
    images: dict[int, bytes] = field(default_factory=dict)  # last ones of the first items
    attacks: list[dict[str, Any]] = field(default_factory=list)  # one entry per finished attack
    protocols: dict[str, Any] = field(default_factory=dict)  # of scaled attacks

    @staticmethod
    def before(model: str, table: pa.Table) -> "Victim":
        """From the predictions on clean items."""
        labels, predictions = (_tensor(table, name) for name in ("label", "clean_prediction"))
        standing = before_attacks(labels, predictions)
        return Victim(model, table["item_id"].to_pylist(), standing, [None] * len(labels))

    @property
    def survivors(self) -> list[int]:
        places: list[int] = self.standing.survivors.tolist()
        return places

    def settle(self, listed: ListedAttack, table: pa.Table, scales: Sequence[Scales]) -> None:
        """Take over what an attack did to the survivors, one row each."""
        if table["place"].to_pylist() != self.survivors:
            raise ValueError(f"{listed.name}: the parts of {self.model} are about other items")
        outcome = Outcome(*(_tensor(table, name) for name in OUTCOME))
        self.standing = after_attack(self.standing, listed.name, outcome)
        standing = self.standing.correct.tolist()
        for row in table.select(["place", "norm", "image"]).to_pylist():
            if not standing[row["place"]]:
                self.norms[row["place"]] = row["norm"]
            if row["image"] is not None:
                self.images[row["place"]] = row["image"]
        self.attacks.append(_entry(self.standing, listed, outcome))
        if listed.scaling:
            self.protocols[listed.name] = _protocol(table, scales)

    def skip(self, listed: ListedAttack) -> None:
        """Nobody is left for this attack; it has an entry all the same."""
        none = Outcome(*[torch.empty(0, dtype=torch.int64)] * len(OUTCOME))
        self.standing = after_attack(self.standing, listed.name, none)
        self.attacks.append(_entry(self.standing, listed, none))

    def page(self) -> dict[str, Any]:
        """The summary of this model."""
        standing = self.standing
        clean = standing.clean_prediction == standing.y
        page = {
            "num_items": len(standing.y),
            "clean_accuracy": accuracy(clean.numpy()),
            "robust_accuracy": accuracy(standing.correct.numpy()),
            "attacks": self.attacks,
            **_costs(standing),
        }
        return page | ({"paper_protocol": self.protocols} if self.protocols else {})

    def share_right(self, table: pa.Table) -> dict[str, Any]:
        """Accuracy on the first items under an attack of its own, whose rows `table` holds."""
        predictions = _tensor(table, "adversarial_prediction")
        return accuracy((predictions == self.standing.y[: len(predictions)]).numpy())


def _entry(standing: Standing, listed: ListedAttack, outcome: Outcome) -> dict[str, Any]:
    """What one attack of the list did; accuracy is what it and all before it left."""
    tally = standing.tallies[-1]
    return {
        "name": listed.name,
        "entry": listed.entry,
        "num_items": tally.num_rows,
        "num_broken": tally.num_broken,
        "robust_accuracy": accuracy(standing.correct.numpy()),
        **_costs(outcome),
    }


def _costs(counted: Outcome | Standing) -> dict[str, Any]:
    num_gradients = int(counted.num_gradients.sum())
    zero = int(counted.num_zero_gradients.sum())
    return {
        "num_evaluations": int(counted.num_evaluations.sum()),
        "num_gradients": num_gradients,
        "zero_gradient_rate": zero / num_gradients if num_gradients else 0.0,
    }


def _protocol(table: pa.Table, scales: Sequence[Scales]) -> dict[str, Any]:
    """Figures of the rescaled networks, apart from the model's own; S = 1 comes first.

    They are about the items that this attack was given: to compare with published tables, let the
    list begin with it.
    """
    columns = {
        "original_accuracy": "original_correct",  # the model itself, each candidate alone
        "scaled_accuracy": "scaled_correct",
        "scaled_clean_accuracy": "scaled_clean_correct",
    }
    correct = {key: np.array(table[column].to_pylist()) for key, column in columns.items()}
    return {
        "num_items": table.num_rows,
        "candidates": [
            {
                "scales": None if i == 0 else list(scales[i - 1]),
                **{key: accuracy(rows[:, i]) for key, rows in correct.items()},
            }
            for i in range(len(scales) + 1)
        ],
        "scaled_union_accuracy": accuracy(np.array(table["scaled_union_correct"].to_pylist())),
        "restarts_accuracy": accuracy(np.array(table["restarts_correct"].to_pylist())),
    }


def write_rows(out: StageDir, victims: Sequence[Victim]) -> None:
    """`attacks.parquet`: one row per model and item."""
    tables = []
    for victim in victims:
        s = victim.standing
        rate = s.num_zero_gradients.double() / s.num_gradients.clamp(min=1)
        tables.append(
            pa.table(
                {
                    "model": [victim.model] * len(s.y),
                    "item_id": victim.item_ids,
                    "label": pa.array(s.y.tolist(), pa.int32()),
                    "clean_prediction": pa.array(s.clean_prediction.tolist(), pa.int32()),
                    "adversarial_prediction": pa.array(
                        s.adversarial_prediction.tolist(), pa.int32()
                    ),
                    "broken_by": pa.array(s.breaker_names(), pa.string()),
                    "num_evaluations": s.num_evaluations.tolist(),
                    "num_gradients": s.num_gradients.tolist(),
                    "zero_gradient_rate": rate.tolist(),
                    "norm": pa.array(victim.norms, pa.float64()),
                }
            )
        )
    with atomic(out.path / "attacks.parquet") as temporary:
        pq.write_table(pa.concat_tables(tables), temporary)


def write_summary(
    out: StageDir, section: AttackSection, listed: Sequence[ListedAttack], pages: dict[str, Any]
) -> None:
    threat = {"kind": section.norm, "unit": UNIT, "eps": section.eps}
    out.write_json(
        "summary.json",
        {
            "threat": threat,
            "attacks": [attack.name for attack in listed],
            "settings": section.model_dump(mode="json"),
            "models": pages,
        },
    )
    _track(out, pages)
    out.run.artifacts(out.path / "attacks.parquet", out.path / "summary.json")


def _track(out: StageDir, pages: Mapping[str, Mapping[str, Any]]) -> None:
    """Accuracies as metrics, the verdict as tags: `suspect` if one model is."""
    values: dict[str, float] = {}
    for model, page in pages.items():
        prefix = f"attack/{out.part}/{model}"
        for name in ("clean_accuracy", "robust_accuracy"):
            values[f"{prefix}/{name}"] = page[name]["value"]
        for attack in page["attacks"]:
            values[f"{prefix}/after_{attack['name']}"] = attack["robust_accuracy"]["value"]
        for name, protocol in page.get("paper_protocol", {}).items():
            for i, candidate in enumerate(protocol["candidates"]):
                key = f"{prefix}/paper_protocol/{name}/{i}"
                values[f"{key}/scaled_accuracy"] = candidate["scaled_accuracy"]["value"]
                values[f"{key}/scaled_clean_accuracy"] = candidate["scaled_clean_accuracy"]["value"]
    out.run.metrics(values)
    verdicts = {model: page["sanity"] for model, page in pages.items() if "sanity" in page}
    if verdicts:
        suspect = any(found["verdict"] == "suspect" for found in verdicts.values())
        reasons = [f"{m}: {reason}" for m, found in verdicts.items() for reason in found["reasons"]]
        tag = f"casemate.attack.{out.part}"
        out.run.tags(
            {
                f"{tag}.verdict": "suspect" if suspect else "reliable",
                f"{tag}.reasons": "; ".join(reasons)[:5000] or "none",
            }
        )


def write_examples(out: StageDir, victims: Sequence[Victim], dataset: PreparedDataset) -> None:
    """A few clean and adversarial images of each model, as arrays."""
    split = dataset.load("test", limit=min(NUM_EXAMPLES, len(victims[0].item_ids)))
    clean = split.pixels().numpy()
    arrays: dict[str, Any] = {}
    for victim in victims:
        arrays[f"{victim.model}/clean"] = clean
        arrays[f"{victim.model}/adversarial"] = np.stack(
            [
                np.frombuffer(victim.images[place], np.float32).reshape(image.shape)
                if place in victim.images  # items that were wrong from the start stay as they are
                else image
                for place, image in enumerate(clean)
            ]
        )
        arrays[f"{victim.model}/label"] = split.labels.numpy()
        for name in ("clean_prediction", "adversarial_prediction"):
            values = getattr(victim.standing, name)[: len(clean)]
            arrays[f"{victim.model}/{name}"] = values.numpy()
    with atomic(out.path / "examples.npz") as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _tensor(table: pa.Table, name: str) -> torch.Tensor:
    return torch.from_numpy(table[name].to_numpy().copy())
