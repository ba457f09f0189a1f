"""A training that its workers stopped for good is a user's mistake, told in one line."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from components.core.errors import CasemateError
from pipelines.recipe.load import loads
from pipelines.runtime.notes import Notes
from pipelines.stages.train import stage as train


def test_the_driver_repeats_what_stopped_the_workers(tmp_path, monkeypatch):
    class Trainer:
        def __init__(self, loop, *, train_loop_config, **_) -> None:
            self.stopped = train_loop_config["job"].notes.path("stopped.json")

        def fit(self) -> None:
            assert not self.stopped.exists()  # of an earlier run
            self.stopped.write_text(json.dumps(["train.objective.num_steps", 1, "leaks labels"]))

    monkeypatch.setattr(train, "FailFastTrainer", Trainer)
    monkeypatch.setattr(train.PreparedDataset, "open", lambda path: None)
    monkeypatch.setattr(train.build, "model_spec", lambda *_: None)
    monkeypatch.setattr(train, "_check_network", lambda *_: None)
    monkeypatch.setattr(train.progress, "follow", lambda *_, **__: nullcontext())
    (tmp_path / "stopped.json").write_text("[]")
    out = SimpleNamespace(
        part="main",
        scratch=tmp_path,
        path=tmp_path,
        fingerprint="0" * 64,
        step="train.main",
        notes=Notes(tmp_path),
        place=SimpleNamespace(recipe="toy"),
        ray_storage="",
    )
    recipe = loads("{name: toy, data: {source: digits}, train: {}}", source="toy")
    with pytest.raises(CasemateError, match=r"^train.objective.num_steps: 1 leaks labels$"):
        train.run(recipe, {"prepare": tmp_path}, out)
