"""The line that a running training shows: its figures, never one under another's name."""

import json
from types import SimpleNamespace

from pipelines.runtime.notes import Notes
from pipelines.stages.train.results import progress_line
from pipelines.stages.train.worker import LiveFile

RUNNING = {"loss": 0.5, "train_accuracy": 0.25, "lr": 1e-3, "eps": 0.1, "images_per_second": 320.4}
ATTACKED = {"train_adversarial_accuracy": 0.25, "train_clean_accuracy": 0.75}


def test_the_line_holds_loss_accuracies_epsilon_rate_and_speed():
    line = progress_line([], RUNNING | ATTACKED)
    assert line == "loss 0.500 clean 0.750 attacked 0.250 eps 0.100 lr 1.0e-03 320 images/s"
    finished = {"val_accuracy": 0.9, "val_robust_accuracy": 0.6, "images_per_second": 100.0}
    line = progress_line([finished], RUNNING | {"eps": None, "images_per_second": None})
    assert line == "loss 0.500 train 0.250 val 0.900 robust 0.600 lr 1.0e-03 100 images/s"


def test_speed_counts_the_steps_of_this_start_only(tmp_path, monkeypatch):
    clock = iter([10.0, 10.0, 12.0, 13.0])
    own = SimpleNamespace(monotonic=lambda: next(clock))  # other modules keep theirs
    monkeypatch.setattr("pipelines.stages.train.worker.time", own)
    session = SimpleNamespace(
        history=[],
        num_done=7,  # restored inside an epoch
        progress=0.5,
        plan=SimpleNamespace(train=SimpleNamespace(batch_size=16)),
        running=lambda: {"loss": 1.0},
        passes=SimpleNamespace(to_dict=dict),
    )

    def speed() -> float | None:
        return json.loads((tmp_path / "live.json").read_text())["running"]["images_per_second"]

    live = LiveFile(Notes(tmp_path), session)
    assert speed() is None
    session.num_done = 12
    live.update()
    assert speed() == 5 * 16 / 2
    session.num_done = 0  # the epoch is over
    live.update()
    assert speed() is None
