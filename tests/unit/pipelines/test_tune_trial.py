"""One trial without Ray around it: resumed exactly, changed honestly, recorded item by item."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from components.core.errors import CasemateError
from components.data.prepared import ImageSplit, LazySplit, PreparedDataset
from components.train import session
from components.train.feed import Feeding
from components.train.objectives.base import Batch
from pipelines.recipe.load import parse
from pipelines.stages.train.session import make_session
from pipelines.stages.train.worker import STATE
from pipelines.stages.tune import training as tune_training
from pipelines.stages.tune import worker as tune_trial

DECAY = "train.weight_decay"


@pytest.fixture
def run(prepared, tmp_path):
    """Run a trial; returns its reports. `checkpoint` is where it starts, `stop` after how many."""

    def trial(values, *, checkpoint=None, stop=None, cluster=None, **train):
        recipe = parse(
            {
                "name": "x",
                "seed": 5,
                "data": {"source": "digits"},
                "cluster": cluster or {},
                "model": {
                    "architecture": "tiny_vit",
                    "options": {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 1},
                },
                "train": {
                    "objective": {"kind": "fgsm", "eps": 0.1},
                    "batch_size": 16,
                    "learning_rate": 0.01,
                    **train,
                },
                "tune": {
                    "space": {DECAY: [0.1, 0.9]},
                    "epochs": 3,
                    "train_items": 48,
                    "attack": {"num_steps": 2, "num_items": 12},
                },
            },
            source="x",
        )
        reports = []

        def report(row, checkpoint=None):
            if checkpoint:
                row = row | {"checkpoint": tmp_path / f"{len(list(tmp_path.iterdir()))}"}
                shutil.copytree(checkpoint.path, row["checkpoint"])
            reports.append(row)
            if stop == len(reports):
                raise KeyboardInterrupt

        job = tune_trial.TrialJob(recipe=recipe.resolved(), dataset=str(prepared), num_threads=1)
        config = {"job": job, "point": {"trial": 0, "values": values}}
        start = checkpoint and tune_trial.tune.Checkpoint.from_directory(str(checkpoint))
        with (
            mock.patch.object(tune_trial.tune, "report", report),
            mock.patch.object(tune_trial.tune, "get_checkpoint", return_value=start),
        ):
            try:
                tune_trial.trial(config)
            except KeyboardInterrupt:
                assert stop
        return reports

    return trial


def weights(report) -> dict[str, torch.Tensor]:
    return torch.load(Path(report["checkpoint"]) / STATE, weights_only=True)["model"]


def same(one, other) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_an_interrupted_trial_ends_as_if_nothing_had_happened(run):
    whole = run({DECAY: 0.1})
    begun = run({DECAY: 0.1}, stop=1)
    rest = run({DECAY: 0.1}, checkpoint=begun[-1]["checkpoint"])
    assert [row["epochs"] for row in [*begun, *rest]] == [1, 2, 3]
    assert [row["finished"] for row in whole] == [False, False, True]
    assert same(weights(whole[-1]), weights(rest[-1]))
    assert rest[-1]["standing"] == whole[-1]["standing"]
    assert rest[-1]["schedule"] == [{"epoch": 0, "values": {DECAY: 0.1}}]


def test_what_is_recorded_item_by_item_is_the_score(run):
    (row,) = run({DECAY: 0.1}, stop=1)
    assert len(row["standing"]) == 12
    assert row["standing"].count("1") / 12 == row["score"] == row["val_robust_accuracy"]


def test_a_copied_trial_goes_on_with_its_own_values_and_remembers_the_others(run):
    start = run({DECAY: 0.1}, stop=1)[-1]["checkpoint"]
    kept, changed = (run({DECAY: value}, checkpoint=start)[-1] for value in (0.1, 0.9))
    assert not same(weights(kept), weights(changed))
    assert changed["schedule"] == [
        {"epoch": 0, "values": {DECAY: 0.1}},
        {"epoch": 1, "values": {DECAY: 0.9}},
    ]
    state = torch.load(Path(changed["checkpoint"]) / STATE, weights_only=True)
    decays = {group["weight_decay"] for group in state["updater"]["optimizer"]["param_groups"]}
    assert decays == {0.0, 0.9}


def test_a_trial_that_keeps_its_best_epoch_is_judged_by_it(run):
    rows = run({DECAY: 0.1}, select="best")
    scores = [row["val_robust_accuracy"] for row in rows]
    for i, row in enumerate(rows):
        assert row["score"] == max(scores[: i + 1])
        assert row["standing"].count("1") / 12 == row["score"]


def test_a_trial_without_attacks_keeps_its_best_clean_epoch(run):
    """An untrained network can have a higher robust accuracy than one trained without attacks."""
    clean, robust = iter([0.2, 0.9, 0.8]), iter([0.5, 0.25, 0.0])
    with (
        mock.patch.object(session, "validation_score", side_effect=lambda *a, **k: next(clean)),
        mock.patch.object(session, "robust_accuracy", side_effect=lambda *a, **k: next(robust)),
    ):
        rows = run({DECAY: 0.1}, select="best", objective={"kind": "standard"}, val_eps=0.1)
    assert [row["kept"]["val_accuracy"] for row in rows] == [0.2, 0.9, 0.9]
    assert [row["score"] for row in rows] == [0.5, 0.25, 0.25]


def test_a_trial_reads_data_like_a_training(run):
    """Larger than `memory_mb`: from disk, only its first items, built by the recipe's threads."""
    real = PreparedDataset.open_split

    def open_split(self, split, *, memory_mb, **options):
        return real(self, split, memory_mb=memory_mb // 4096, **options)  # digits are small

    with (
        mock.patch.object(PreparedDataset, "open_split", open_split),
        mock.patch.object(tune_training, "make_session", wraps=make_session) as made,
    ):
        streamed = run({DECAY: 0.1}, stop=1, memory_mb=1, cluster={"feed_threads": 3})
        whole = run({DECAY: 0.1}, stop=1)
    lazy, loaded = (call.kwargs for call in made.call_args_list)
    assert (type(lazy["train"]), type(loaded["train"])) == (LazySplit, ImageSplit)
    assert len(lazy["train"]) == len(loaded["train"]) == 48
    assert lazy["feeding"] == Feeding(3, 6)
    assert loaded["feeding"] == Feeding()
    assert streamed[0]["epochs"] == whole[0]["epochs"] == 1


def test_a_mistake_is_reported_and_not_raised(run):
    error = ["train.objective.aas", "tiny_vit", "remedy"]
    with mock.patch.object(tune_training, "make_session", side_effect=CasemateError(*error)):
        rows = run({DECAY: 0.1})
    assert rows == [{"epochs": 0, "score": 0.0, "mistake": error}]


def test_a_trial_whose_checkpoint_was_removed_is_trained_again(run, tmp_path):
    whole, gone = run({DECAY: 0.1}), tmp_path / "gone"
    gone.mkdir()
    again = run({DECAY: 0.1}, checkpoint=gone)
    assert [row["epochs"] for row in again] == [1, 2, 3]
    assert same(weights(whole[-1]), weights(again[-1]))


def test_training_that_cannot_go_on_is_a_result(run):
    stopped = tune_training.TrainingStoppedError("train.objective", "fgsm", "leaks")
    with mock.patch.object(tune_training.Session, "run_epoch", side_effect=stopped):
        rows = run({DECAY: 0.1})
    assert rows == [{"epochs": 0, "score": 0.0, "stopped": str(stopped)}]


def test_a_recording_has_the_shares_of_all_workers(prepared, monkeypatch):
    monkeypatch.setattr(tune_training, "BATCH", 2)
    data = PreparedDataset.open(prepared).load("val", limit=5)
    labels = data.labels
    wrong = SimpleNamespace(predictions=lambda model, batch: batch.labels ^ 1)
    right = SimpleNamespace(predictions=lambda model, batch: batch.labels)

    def share(steps: list[int], broken: int) -> tune_training.RecordedAttack:
        recorded = tune_training.RecordedAttack(right)
        for step in steps:
            rows = [row for row in (2 * step, 2 * step + 1) if row < 5]
            ids = tuple(data.item_ids[i] for i in rows)
            recorded.attack = wrong if step == broken else right
            recorded.predictions(None, Batch(data.pixels(rows), labels[rows], ids, 0, 0, step))
        return recorded

    assert share([0, 1, 2], broken=1).robust(5, lambda own: own) == "11001"
    sums = []
    share([1], broken=1).robust(5, lambda own: sums.append(own) or own)
    assert share([0, 2], broken=1).robust(5, lambda own: own + sums[0]) == "11001"
    recorded = share([0, 1, 2], broken=1)
    recorded.attack = wrong  # the next epoch
    recorded.predictions(None, Batch(data.pixels([4]), labels[[4]], data.item_ids[4:5], 0, 0, 2))
    assert recorded.robust(5, lambda own: own) == "11000"
