"""Bad input as users meet it: exit code 2, one line that names the place and the remedy.

One case of each kind is tried in a process of its own; the rest shares this one and its Ray.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from PIL import Image

from components.core.errors import CasemateError
from pipelines.flow.plan import plan
from pipelines.recipe import load as recipes
from pipelines.runtime.step_locks import hold
from pipelines.runtime.store import open_store
from pipelines.stages.certify import stage
from tests.e2e.cli import TINY, Result, call, step_folder, tiny_recipe
from tests.steps import files_of

pytestmark = pytest.mark.e2e

NOTES = re.compile(  # progress of the flow; on a busy machine workers take their time
    r"^[a-z0-9.-]+ +((done before|[0-9.]+ s) +[a-z0-9.-]+|started)$"
    r"|^items +\d+ train, \d+ val, \d+ test; "
    r"|^[a-z0-9. -]+: (waiting for \d+ worker|\d+ of \d+ steps to run, into )"
)
ANYWHERE = "http://127.0.0.1:1"  # nobody listens on port 1


def assert_refused(result: Result, *words: object) -> None:
    """Exit code 2 and exactly one complaint with all these words; beside it only progress."""
    lines = result.err.splitlines()
    complaints = [line for line in lines if not NOTES.match(line)]
    assert result.code == 2, result.err
    assert len(complaints) == 1, result.err
    assert complaints[0].startswith("casemate: ")
    for word in words:
        assert str(word) in complaints[0]
    # Ray itself may print that calls to an actor were lost which was ended between two stages.
    assert [line for line in result.out.splitlines() if "(raylet)" not in line] == []
    assert "Traceback" not in result.err


def files(root: Path) -> set[str]:
    """All files below a folder, except the log of locks."""
    found = {p.relative_to(root).as_posix() for p in root.rglob("*") if not p.is_dir()}
    return {name for name in found if "/locks/" not in name}


@pytest.fixture
def recipe(tmp_path):
    return tiny_recipe(tmp_path / "tiny.yaml")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.colour=red", ["data.colour: 'red' is unknown", "allowed: channels, "]),
        ("train.epoch=3", ["train.epoch: 3 is unknown", "did you mean 'epochs'?"]),
        ("certfy={}", ["certfy: {} is unknown", "did you mean 'certify'?"]),
        ("train.epochs=many", ["train.epochs: 'many'", "is not a whole number"]),
        ("data=5", ["data: 5", "is not a section"]),
        ("attack.linf.eps=8", ["attack.linf.eps: 8 is outside [0, 1]", "write e.g. 8/255"]),
        ("attack.linf.models=[mian]", ["attack.linf.models: mian", "did you mean 'main'?"]),
        ("certify.l2.num_estimate=9", ["num_estimate: 9 draws", "never certify", "raise "]),
        (
            "certify.l2={kind: gaussian, sigma: 0.25, num_estimate: 400, failure_prob: 1e-140}",
            ["failure_prob 1e-140", "never certify", "raise "],
        ),
        ("certify.l2.failure_prob=1", ["certify.l2.failure_prob: 1", "must be below 1"]),
    ],
)
def test_recipe_mistakes_name_file_key_and_value(cli, tmp_path, recipe, override, words):
    run = cli if override == "data.colour=red" else call
    result = run("run", recipe, "--set", override, "--storage", tmp_path / "storage")
    assert_refused(result, recipe, *words)
    assert files(tmp_path) == {"tiny.yaml"}
    assert not (tmp_path / "storage").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.epochs", ["--set: train.epochs is not key=value", "--set train.epochs=2"]),
        ("train.epochs=[", ["--set train.epochs: [ is not a YAML value"]),
        ("seed.x=3", ["--set seed.x: 3 cannot be set", "`seed` is not a section"]),
    ],
)
def test_overrides_that_cannot_be_read(tmp_path, recipe, override, words):
    assert_refused(call("run", recipe, "--set", override, "--storage", tmp_path / "s"), *words)
    assert files(tmp_path) == {"tiny.yaml"}


def test_recipes_that_are_not_there_or_no_recipes(cli, tmp_path):
    missing = tmp_path / "nowhere.yaml"
    assert_refused(cli("run", missing), missing, "is not a file", "check the path")
    assert_refused(call("lint", "dmo"), "recipe: dmo", "did you mean 'demo'?")
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: x\ndata: {source: [digits}\n")
    assert_refused(call("recipes", broken), broken, "is not valid YAML", "line 2")
    broken.write_bytes(b"\xff\xfe\x00recipe")
    assert_refused(call("lint", broken), broken, "UTF-8")
    assert files(tmp_path) == {"broken.yaml"}


def test_a_stage_that_the_recipe_does_not_have(tmp_path, recipe):
    result = call("tune", recipe, "--storage", tmp_path / "storage")
    assert_refused(result, "stage: tune", "no such section")


@pytest.mark.parametrize("source", ["folder", "npz", "torchvision:cifar10"])
def test_a_dataset_that_is_not_there(cli, tmp_path, source):
    data = {"source": source, "path": str(tmp_path / "no images")}
    recipe = tiny_recipe(tmp_path / "tiny.yaml", data=data)
    run = cli if source == "folder" else call
    result = run("run", recipe, "--storage", tmp_path / "storage")
    assert_refused(result, f"data.path: {data['path']} does not exist", source)
    assert files(tmp_path) == {"tiny.yaml"}


@pytest.mark.parametrize("place", ["file/below", "file", "/proc/casemate", "ftp://host/runs"])
def test_storage_that_cannot_be_written(cli, tmp_path, recipe, place):
    (tmp_path / "file").write_text("in the way")
    storage = place if "://" in place else tmp_path / place
    run = cli if place == "/proc/casemate" else call
    result = run("run", recipe, "--storage", storage)
    remedy = "choose s3://" if "://" in place else "choose another with --storage"
    assert_refused(result, f"storage.root: {storage} ", remedy)
    assert files(tmp_path) == {"tiny.yaml", "file"}
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", ["127.0.0.1:1 cannot be reached", "is the cluster up?"]),
        ("localhost", ["localhost is not host:port", "write e.g. "]),
        ("127.0.0.1:many", ["127.0.0.1:many is not host:port", "write e.g. "]),
    ],
)
def test_clusters_that_cannot_be_joined(cli, tmp_path, recipe, address, words):
    storage = tmp_path / "storage"
    run = cli if address == "127.0.0.1:1" else call
    result = run("run", recipe, "--address", address, "--storage", storage)
    assert_refused(result, f"cluster.address: {words[0]}", words[1])
    assert files(tmp_path) == {"tiny.yaml"}


def test_an_address_in_the_recipe_is_tried_like_one_on_the_command_line(tmp_path):
    recipe = tiny_recipe(tmp_path / "tiny.yaml", cluster={"address": "127.0.0.1:1"})
    result = call("run", recipe, "--storage", tmp_path / "storage")
    assert_refused(result, "cluster.address: 127.0.0.1:1 cannot be reached")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (ANYWHERE, [f"{ANYWHERE} cannot be reached", "is the cluster up?"]),
        ("127.0.0.1:8265", ["127.0.0.1:8265 is not an http address", "write e.g. http://"]),
        ("http://127.0.0.1:many", ["http://127.0.0.1:many is not host:port", "write e.g. "]),
        ("https://127.0.0.2", ["https://127.0.0.2 cannot be reached", "is the cluster up?"]),  # 443
    ],
)
def test_clusters_that_take_no_jobs(cli, tmp_path, recipe, address, words):
    run = cli if address == ANYWHERE else call
    result = run("submit", recipe, "--address", address, "--storage", tmp_path / "storage")
    assert_refused(result, f"--address: {words[0]}", words[1])
    assert files(tmp_path) == {"tiny.yaml"}
    for command in ("status", "logs", "stop"):
        assert_refused(call(command, "tiny-00000000", "--address", address), *words)


def test_a_second_run_into_the_same_storage_is_refused(cli, tmp_path, recipe):
    storage = tmp_path / "storage"
    train = next(s for s in plan(recipes.load(str(recipe)), storage) if s.step.stage == "train")
    with hold(open_store(storage), [train.place.key]):
        result = cli("run", recipe, "--storage", storage)
    assert_refused(result, train.folder, "is in use by another run", "wait for it or stop it")
    assert all("/locks/" in file for file in files(tmp_path) - {"tiny.yaml"})


@pytest.fixture
def certificate(finished_flow, tmp_path):
    """Copies of finished certificates, to be spoiled."""

    def copy(step: str) -> Path:
        return shutil.copytree(step_folder(finished_flow, step), tmp_path / step)

    return copy


@pytest.mark.parametrize(
    ("step", "option", "value", "words"),
    [
        ("certify.l2", "--patch-sizes", "1,2", ["patch_sizes", "does not apply to gaussian"]),
        ("certify.l2", "--rule", "loc", ["rule", "loc does not apply to gaussian"]),
        ("certify.patch", "--radii", "0.1", ["radii", "does not apply to columns"]),
        ("certify.patch", "--failure-prob", "0.1", ["failure_prob", "does not apply to columns"]),
        (
            "certify.l2",
            "--failure-prob",
            "1e-140",
            ["num_estimate: 400 draws", "failure_prob 1e-140", "use 466 or more"],
        ),
        ("certify.l2", "--failure-prob", "2", ["failure_prob: 2.0 is outside (0, 1)"]),
        ("certify.l2", "--failure-prob", "nan", ["failure_prob: nan is outside (0, 1)"]),
        ("certify.l2", "--radii", "0.1;0.2", ["--radii: 0.1;0.2", "comma-separated"]),
        ("certify.l2", "--radii", "-1", ["radii: -1.0", "positive"]),
        (
            "certify.l2",
            "--radii",
            "0.1,0.3",
            ["radii: 0.3 is above 0.2117, the most that 400 draws of sigma 0.1", "or drop it"],
        ),
        (
            "certify.l2",
            "--failure-prob",
            "1e-50",
            ["radii: 0.1 is above 0.0674", "failure_prob 1e-50; raise num_estimate to 667"],
        ),
        ("certify.patch", "--patch-sizes", "99", ["patch_sizes: 99", "1..8"]),
        ("certify.patch", "--rule", "best", ["rule: best", "strict, count, loc"]),
    ],
)
def test_recertify_refuses_settings_that_do_not_fit(
    finished_flow, tmp_path, step, option, value, words
):
    out = tmp_path / "new"
    result = call("recertify", step_folder(finished_flow, step), option, value, "--out", out)
    assert_refused(result, *words)
    assert not out.exists()


def test_recertify_never_overwrites_what_it_reads(certificate):
    folder = certificate("certify.l2")
    before = {name: p.read_bytes() for name, p in files_of(folder).items()}
    assert_refused(call("recertify", folder, "--out", folder), folder, "choose another folder")
    for place in (folder / "votes.parquet", folder / "votes.parquet" / "below"):
        assert_refused(call("recertify", folder, "--out", place), f"out: {place}", "choose another")
    assert {name: p.read_bytes() for name, p in files_of(folder).items()} == before


def test_certificates_that_are_not_there_or_not_whole(cli, certificate, tmp_path):
    nowhere = tmp_path / "nowhere"
    assert_refused(
        cli("verify", nowhere), f"path: {nowhere} is neither a folder with a certificate"
    )
    assert_refused(call("recertify", nowhere), f"path: {nowhere} is neither a folder")
    assert files(tmp_path) == set()
    folder = certificate("certify.patch")
    votes = (folder / "votes.parquet").read_bytes()
    (folder / "votes.parquet").write_bytes(votes[: len(votes) // 2])
    for command in ("verify", "recertify"):
        assert_refused(call(command, folder), folder / "votes.parquet")
    (folder / "votes.parquet").unlink()
    assert_refused(call("verify", folder), folder / "votes.parquet")
    (folder / "certificate.json").write_text('{"format_version": 1')
    assert_refused(call("verify", folder), folder / "certificate.json", "damaged")
    assert not folder.with_name("certify.patch-recertified").exists()


def test_a_damaged_finished_step_is_named(finished_flow, tmp_path):
    storage = tmp_path / "storage"
    shutil.copytree(finished_flow / "tiny", storage / "tiny")
    weights = step_folder(storage, "train.main") / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    result = call("run", finished_flow.parent / "tiny.yaml", "--storage", storage)
    assert_refused(result, weights, "changed", "--force")


# From here on the cases need Ray: one session for all of them.


@pytest.fixture
def photos(tmp_path):
    """Two classes of ten small images, in a place with spaces and accents."""
    root = tmp_path / "mes images été"
    generator = np.random.default_rng(0)
    for name in ("chat noir", "hérisson"):
        (root / name).mkdir(parents=True)
        for number in range(10):
            pixels = generator.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"n° {number}.png")
    return root


def prepare(tmp_path: Path, photos: Path, **data: object) -> Result:
    values = {"source": "folder", "path": str(photos), **data}
    recipe = tiny_recipe(tmp_path / "tiny.yaml", data=values, train=None, attack={}, certify={})
    return call("prepare", recipe, "--storage", tmp_path / "störage 1", "--json")


def sealed(tmp_path: Path) -> list[Path]:
    """What would pass for a finished dataset."""
    found = (tmp_path / "störage 1").rglob("*")
    return [p for p in found if p.name in ("manifest.json", "dataset.json") or p.suffix == ".tmp"]


def test_an_empty_class_folder_is_named(ray_session, tmp_path, photos):
    (photos / "vide").mkdir()
    result = prepare(tmp_path, photos)
    assert_refused(result, f"data.path: {photos / 'vide'} holds no image", ".png")
    assert sealed(tmp_path) == []


def test_an_undecodable_image_is_named_and_skipped_only_when_asked(ray_session, tmp_path, photos):
    good = photos / "chat noir" / "n° 3.png"
    good.write_bytes(good.read_bytes()[:40])  # cut short
    result = prepare(tmp_path, photos)
    assert_refused(result, f"data.path: {good} is not a readable image", "data.on_error=skip")
    assert sealed(tmp_path) == []

    (photos / "hérisson" / "n° 7.png").write_text("no image at all")
    result = prepare(tmp_path, photos, on_error="skip")
    assert result.code == 0, result.err
    dataset = json.loads((Path(result.json["steps"]["prepare"]) / "dataset.json").read_text())
    skipped = {entry["item_id"]: entry["reason"] for entry in dataset["skipped"]}
    assert set(skipped) == {"folder-chat noir/n° 3.png", "folder-hérisson/n° 7.png"}
    assert all("is not a readable image" in reason for reason in skipped.values())
    assert sum(split["num_items"] for split in dataset["splits"].values()) == 20 - len(skipped)
    assert dataset["classes"] == ["chat noir", "hérisson"]


def test_a_tracking_store_that_cannot_be_made(ray_session, tmp_path, recipe):
    uri = f"sqlite:///{recipe}/below/mlflow.db"
    storage = tmp_path / "storage"
    result = call("run", recipe, "--set", f"tracking.uri={uri}", "--storage", storage)
    assert_refused(result, f"tracking.uri: {uri} cannot be used")
    assert files(tmp_path) == {"tiny.yaml"}


def test_only_undecodable_images_make_no_dataset(ray_session, tmp_path, photos):
    for image in photos.glob("hérisson/*.png"):
        image.write_text("no image at all")
    result = prepare(tmp_path, photos, on_error="skip")
    assert_refused(result, "hérisson", "repair them")
    assert sealed(tmp_path) == []


@pytest.fixture(scope="module")
def trained(finished_flow, tmp_path_factory):
    """A storage with finished data and models only; its path has a space and an umlaut."""
    storage = tmp_path_factory.mktemp("trained") / "größe 1"
    for step in ("prepare", "train.main", "train.columns"):
        source = step_folder(finished_flow, step)
        shutil.copytree(source, storage / "tiny" / source.name)
    return storage


def statuses(storage: Path) -> dict[str, list[str]]:
    """How the MLflow runs of each name ended."""
    client = MlflowClient(f"sqlite:///{storage}/mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    names = {run.info.run_name for run in found}
    return {n: [r.info.status for r in found if r.info.run_name == n] for n in names}


def test_a_truncated_part_is_named_and_its_remedy_works(
    kept_workers, finished_flow, trained, tmp_path, monkeypatch
):
    certify = {"patch": TINY["certify"]["patch"]}
    recipe = tiny_recipe(tmp_path / "tiny.yaml", certify=certify, attack={})
    steps = plan(recipes.load(str(recipe)), trained)
    (step,) = [s for s in steps if s.name == "certify.patch"]

    def stops(*_: object) -> None:
        raise CasemateError("votes", "x", "are not written: the test stops here")

    with monkeypatch.context() as patched:
        patched.setattr(stage, "write_votes", stops)
        assert_refused(call("certify", recipe, "--storage", trained), "the test stops here")
    part = min(step.folder.glob("unfinished/votes/*/*.arrow"))
    whole, kept = part.read_bytes(), files(step.folder)
    assert any("unfinished/probe/" in name for name in kept)  # how votes are computed
    part.write_bytes(whole[: len(whole) // 2])

    result = call("certify", recipe, "--storage", trained)
    assert_refused(result, f"part: {part} is damaged", "delete this file")
    assert files(step.folder) == kept
    assert statuses(trained)["certify.patch"] == ["FAILED"]

    part.unlink()
    result = call("certify", recipe, "--storage", trained)
    assert result.code == 0, result.err
    assert statuses(trained)["certify.patch"] == ["FINISHED"]  # the same run went on
    for name in ("votes.parquet", "certificates.parquet", "certificate.json"):
        ours = (step.folder / name).read_bytes()
        assert ours == (step_folder(finished_flow, "certify.patch") / name).read_bytes()


def test_votes_of_another_model_are_refused(kept_workers, certificate, trained, tmp_path):
    settings = {**TINY["certify"]["l2"], "model": "columns", "challenge": None}
    recipe = tiny_recipe(tmp_path / "tiny.yaml", certify={"other": settings}, attack={})
    made = call("certify", recipe, "--storage", trained, "--json")
    assert made.code == 0, made.err
    other = Path(made.json["steps"]["certify.other"])
    mine = certificate("certify.l2")
    digests = [
        json.loads((folder / "certificate.json").read_text())["evidence"]["model_digest"]
        for folder in (mine, other)
    ]
    assert len(set(digests)) == 2
    shutil.copyfile(other / "votes.parquet", mine / "votes.parquet")

    told = call("verify", mine)  # can be read, but is not true: failed, not bad input
    assert told.code == 1
    (line,) = [x for x in told.out.splitlines() if "evidence.model_digest" in x]
    assert all(digest in line for digest in digests)
    result = call("recertify", mine, "--failure-prob", 0.05, "--out", tmp_path / "new")
    assert_refused(result, mine / "votes.parquet", "model_digest", *digests)
    assert not (tmp_path / "new").exists()

    model = step_folder(trained, "train.main") / "model"
    result = call("verify", other, "--resample", 1, "--model", model)
    assert_refused(result, f"--model: {model}", *(digest[:12] for digest in digests))
    assert_refused(call("verify", other, "--resample", -1), "--resample: -1", "1 or more")
