"""Workers read the shards of their units, and those of the few items that check the model."""

import pytest
import torch

from components.attacks.passes import AttackPasses
from components.certify.l2.settings import GaussianSettings
from components.certify.l2.voters import draw_unit
from components.certify.patch.settings import AblationSettings
from components.certify.registry import family_of
from components.certify.vote_requests import VoteRequest
from components.data import stream
from components.data.fitting import Fitting
from components.data.sources import open_source
from components.models.checkpoint import save_model
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from pipelines.stages.attack.worker import AttackConfig, AttackWorker, CleanTask
from pipelines.stages.evaluate.worker import EvaluateConfig, EvaluateWorker
from tests.unit.pipelines.conftest import OPTIONS, write_prepared

SHARD, NUM_ITEMS = 10, 200
ASKED = (150, 151, 163)  # in shards 15 and 16


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    limits = {"train": 20, "val": 20, "test": NUM_ITEMS}
    data = root / "data"
    data.mkdir()
    source = open_source("digits", path=None)
    write_prepared(data, source, Fitting(), limits=limits, shard_size=SHARD)
    torch.manual_seed(0)
    spec = ModelSpec("tiny_vit", 10, 1, 8, (0.5,), (0.5,), options=OPTIONS, token_policy="drop")
    save_model(root / "model", PixelModel(spec).eval(), recipe_digest="")
    return data, root / "model"


@pytest.fixture
def read(monkeypatch):
    found = []
    real = stream.read_shard

    def reading(folder, shard, **options):
        found.append(int(shard.file.split("-")[1].split(".")[0]))
        return real(folder, shard, **options)

    monkeypatch.setattr(stream, "read_shard", reading)
    return found


def test_an_attack_reads_the_shards_of_its_items(places, read):
    data, model = places
    config = AttackConfig(
        data,
        {"main": model},
        norm="linf",
        eps=0.1,
        passes=AttackPasses(micro_batch=8, compiled=False),
        seed=0,
    )
    worker = AttackWorker(config, "cpu")
    assert not read
    for _ in range(2):
        assert worker(CleanTask("main", ASKED)).num_rows == len(ASKED)
    assert read == [0, 1, 2, 15, 16]  # 25 items check the model


def test_an_evaluation_reads_the_shards_of_its_items(places, read):
    data, model = places
    worker = EvaluateWorker(EvaluateConfig(data, {"main": model}, micro_batch=8, seed=0), "cpu")
    for _ in range(2):
        assert len(worker.items(ASKED)) == len(ASKED)
    assert read == [15, 16]


@pytest.mark.parametrize("kind", ["gaussian", "columns"])
def test_votes_read_the_shards_of_their_items(places, read, kind):
    data, model = places
    settings = {
        "gaussian": GaussianSettings(kind="gaussian", sigma=0.25, num_estimate=50, num_select=4),
        "columns": AblationSettings(kind="columns", band=2, patch_sizes=(1,)),
    }[kind]
    family = family_of(kind)
    request = VoteRequest(
        settings=settings, key="x", dataset=data, model=model, denoiser=None, seed=0, device="cpu"
    )
    voter = family.worker(family.prepare(request, source=None))
    checked = len(read)  # two items check the model
    assert set(read) == {0}
    units = [draw_unit(settings, item, 0).payload for item in ASKED] if kind == "gaussian" else []
    for payload in units or [ASKED]:
        voter(payload)
        voter(payload)
    assert read[checked:] == [15, 16]
