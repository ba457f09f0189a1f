"""The feed in recipes: stored formats, threads and order; what is fingerprinted or refused."""

import pytest

from components.core.errors import CasemateError
from components.data import encodings
from components.data.encodings import PNG
from components.data.fitting import Fitting
from components.data.settings import DataSettings
from components.data.shards import plan_shards
from pipelines.recipe import check, load
from pipelines.stages.prepare import stage as prepare
from pipelines.stages.prepare.steps import _data_identity


def section(**data) -> DataSettings:
    return load.parse({"name": "test", "data": {"source": "mnist5k", **data}}, source="r").data


@pytest.mark.parametrize("train_size", [None, 24])
def test_only_training_images_are_jpeg(tmp_path, train_size):
    data = section(train_format="jpeg", image_size=20, fit="resize", train_size=train_size)
    source, generated = prepare.open_sources(data)
    plans = plan_shards(prepare.list_splits(data, source, generated), shard_size=1000)
    fitting = Fitting(data.image_size, data.fit)
    jobs = prepare.open_jobs(data, source, generated, plans, fitting=fitting, folder=tmp_path)
    assert {split: job.encoding.format for split, job in jobs.items()} == {
        "train": "jpeg",
        "val": "png",
        "test": "png",
    }
    plain = section(image_size=20, fit="resize")
    jobs = prepare.open_jobs(plain, source, generated, plans, fitting=fitting, folder=tmp_path)
    assert {job.encoding for job in jobs.values()} == {PNG}


def test_the_decoder_is_part_of_the_fingerprint_of_jpeg_only(monkeypatch):
    old, jpeg, raw = (section(train_format=kind) for kind in ("png", "jpeg", "raw"))
    identities = [_data_identity(data) for data in (old, jpeg, raw)]
    assert not {"train_format", "train_quality", "decoder"} & identities[0].keys()
    assert identities[2] == identities[0] | {"train_format": "raw"}
    decoder = {"decoder": encodings.jpeg_decoder()}
    assert identities[1] == identities[0] | {"train_format": "jpeg"} | decoder
    monkeypatch.setattr(encodings, "version", lambda name: "0.0")
    assert _data_identity(jpeg)["decoder"] == "torchcodec 0.0"
    assert _data_identity(old) == identities[0]


def test_sources_without_training_items_refuse_a_format(tmp_path):
    data = {"source": "imagenet_r", "path": str(tmp_path), "train_format": "jpeg"}
    recipe = load.parse({"name": "test", "data": data}, source="r")
    with pytest.raises(CasemateError, match=r"train_format: jpeg does not apply: imagenet_r has"):
        check.check(recipe)
    with pytest.raises(CasemateError, match="has no training items"):
        prepare.check_no_training(recipe.data)


def test_a_missing_decoder_is_told_by_the_gate(monkeypatch):
    recipe = load.parse(
        {"name": "test", "data": {"source": "mnist5k", "train_format": "jpeg"}}, source="r"
    )
    check.check(recipe)
    monkeypatch.setattr(encodings, "DECODER", "no-such-decoder")
    with pytest.raises(CasemateError, match="needs no-such-decoder, which is not installed"):
        check.check(recipe)


def test_feed_threads_follow_the_cores_of_a_gpu_worker():
    def threads(**cluster) -> int:
        document = {"name": "test", "data": {"source": "mnist5k"}, "cluster": cluster}
        return load.parse(document, source="r").cluster.num_feed_threads

    assert threads() == threads(cpus_per_train_worker=8) == 1  # the model needs the cores
    assert threads(cpus_per_train_worker=8, gpus_per_train_worker=1) == 8
    assert threads(feed_threads=3, cpus_per_train_worker=8, gpus_per_train_worker=1) == 3
    with pytest.raises(CasemateError, match=r"cluster\.feed_threads"):
        threads(feed_threads=0)


def test_the_balanced_order_is_refused_beside_generated_images(tmp_path):
    made = {"source": "npz", "path": str(tmp_path), "ratio": 0.5}
    document = {
        "name": "test",
        "data": {"source": "mnist5k", "synthetic": made},
        "train": {"order": "balanced"},
    }
    with pytest.raises(CasemateError, match=r"train\.order: balanced cannot be combined"):
        check.check(load.parse(document, source="r"))
