"""Any model through the command line: files, code, folders and hubs, each on Ray workers.

Programs, code and folders are real. No hub is reachable in tests: `hf:` and `timm:` read a cache in
Hugging Face's layout with the code of timm and huggingface_hub, `robustbench:` a package with the
signatures of RobustBench's own.
"""

import dataclasses
import json
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import timm
import torch
from huggingface_hub import constants
from timm.models import _registry
from torch import nn

from tests.e2e.cli import call, mistake_of, step_folder
from tests.model_places import (
    CLASSES,
    export_pt2,
    timm_config,
    trained_network,
    write_repository,
    write_robustbench,
)

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A network in a .pt2 file, as TorchScript, and as code with its weights."""
    folder = tmp_path_factory.mktemp("mine")
    net = trained_network(folder)
    export_pt2(net, folder / "net.pt2")
    torch.jit.script(net).save(folder / "script.pt")
    torch.save(net.state_dict(), folder / "weights.pt")
    return folder


@pytest.fixture
def data(finished_flow):
    return step_folder(finished_flow, "prepare")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    return tmp_path / "hub"


def done(*arguments):
    """A command that succeeds and writes a report; its JSON."""
    said = call(*arguments, "--json")
    assert said.code == 0, said.err
    assert "test; attacks, evaluations and certificates use test" in said.err
    assert Path(said.json["report"]).is_file()
    return said.json


@pytest.mark.ray
def test_an_exported_program_is_attacked_and_evaluated(kept_workers, home, data, tmp_path):
    on_data = ("--data", data, "--storage", tmp_path, "--num-items", 24)  # all
    budget = ("--eps", 0.2, "--attacks", "fgsm,pgd-5", "--set", "attack.linf.sanity=null")
    attacked = done("attack", "--model", home / "net.pt2", *on_data, *budget)
    assert set(attacked["steps"]) == {"prepare", "model.main", "attack.linf", "report"}
    clean, _, robust = attacked["summary"]
    assert robust["value"] < clean["value"] > 0.6
    stored = Path(attacked["steps"]["model.main"])
    assert stored.parent.name == "attack-net-pt2"
    assert [path.suffix for path in (stored / "code").iterdir()] == [".pt2"]
    evaluated = done("evaluate", "--model", home / "script.pt", *on_data)
    (row,) = [row for row in evaluated["summary"] if "clean" in row["what"]]
    assert (row["value"], row["num_items"]) == (clean["value"], 24)
    step = Path(attacked["steps"]["attack.linf"])
    manifest = json.loads((step / "manifest.json").read_text())
    assert manifest["input_folders"]["model.main"] == f"../{stored.name}"
    # The stored folder is a model of its own: the same model, so the same step.
    again = done("attack", "--model", stored, *on_data, *budget)
    other = Path(again["steps"]["attack.linf"])
    assert other.name == step.name
    tables = [pq.read_table(folder / "attacks.parquet") for folder in (step, other)]
    assert tables[0].equals(tables[1])


@pytest.mark.ray
def test_code_of_ones_own_is_certified(kept_workers, home, data, tmp_path):
    made = done(
        *("certify", "--model", f"python:{home / 'digit_net.py'}:build", "--data", data),
        *("--weights", home / "weights.pt", "--storage", tmp_path, "--num-items", 4),
        *("--patch-sizes", "1,2", "--band", 4, "--stride", 2),
        *("--sigma", 0.1, "--radii", "0.05,0.1", "--num-estimate", 200),
        *("--set", "certify.l2.block_size=200", "--set", "certify.l2.micro_batch=200"),
    )
    whats = [row["what"] for row in made["summary"]]
    assert any("patch" in what for what in whats)
    assert any("l2" in what for what in whats)
    assert Path(made["steps"]["model.main"]).parent.name == "certify-digit-net-py-build-weights"
    for name in ("certify.patch", "certify.l2"):
        said = call("verify", made["steps"][name], "--resample", 1, "--json")
        assert said.code == 0, said.out + said.err


@pytest.mark.ray
def test_a_repository_of_the_hub_is_analyzed(kept_workers, hub, data, tmp_path):
    config = timm_config()
    torch.manual_seed(0)
    net = timm.create_model(config["architecture"], num_classes=CLASSES, **config["model_args"])
    write_repository(hub, "me/digits", {"config.json": config}, net.state_dict())
    made = done("analyze", "--model", "hf:me/digits", "--data", data, "--study", "correlation",
                "--num-items", 8, "--storage", tmp_path)  # fmt: skip
    header = json.loads((Path(made["steps"]["model.main"]) / "model.json").read_text())
    assert header["spec"]["trained_for"] == {"loaded_from": "hf:me/digits"}
    assert Path(made["steps"]["analyze.correlation"]).parent.name == "analyze-hf-me-digits"


@pytest.mark.ray
def test_a_folder_is_certified_as_it_was_trained(kept_workers, finished_flow, data, tmp_path):
    folder = step_folder(finished_flow, "train.columns")
    made = done("certify", "--model", folder, "--data", data, "--patch-sizes", 1,
                "--storage", tmp_path, "--num-items", 4)  # fmt: skip
    assert made["steps"]["model.main"] == str(folder / "model")
    made_in = Path(made["steps"]["certify.patch"])
    assert made_in.parent.name == f"certify-{folder.name.replace('.', '-')}"
    document = json.loads((made_in / "certificate.json").read_text())
    assert document["evidence"]["settings"]["band"] == 2


@pytest.mark.cluster
def test_a_name_of_timm_is_evaluated(hub, monkeypatch, tmp_path):
    """Architecture and loading are timm's; its weights and their description are made up."""
    name = "test_resnet.r160_in1k"
    config = timm.get_pretrained_cfg(name)
    small = dataclasses.replace(config, input_size=(3, 8, 8), num_classes=CLASSES)
    monkeypatch.setitem(_registry._model_pretrained_cfgs, name, small)
    net = timm.create_model("test_resnet", num_classes=CLASSES)
    write_repository(hub, f"timm/{name}", {}, net.state_dict())
    made = done(
        *("evaluate", "--model", f"timm:{name}", "--data", "digits", "--storage", tmp_path),
        *("--num-items", 8, "--set", "data.limits={train: 20, val: 10, test: 20}"),
    )
    header = json.loads((Path(made["steps"]["model.main"]) / "model.json").read_text())
    assert (header["spec"]["architecture"], header["spec"]["channels"]) == (name, 3)


@pytest.mark.cluster
def test_a_model_of_robustbench_is_attacked_on_workers_that_have_the_package(cli, tmp_path):
    package = write_robustbench(tmp_path / "package")
    place = tmp_path / "cache" / "robustbench" / "cifar10" / "Linf"
    place.mkdir(parents=True)
    torch.manual_seed(3)
    head = nn.Linear(3 * 32 * 32, 10).state_dict()
    torch.save({f"head.{key}": value for key, value in head.items()}, place / "Stand2020In.pt")
    env = {
        "PYTHONPATH": str(package),
        "CASEMATE_USER_CODE": str(tmp_path / "cache" / "user_code"),
    }
    said = cli(
        *("attack", "--model", "robustbench:Stand2020In@cifar10/Linf", "--data", "digits"),
        *("--fit", "resize", "--eps", "8/255", "--attacks", "fgsm", "--num-items", 8, "--json"),
        *("--set", "data.limits={train: 20, val: 10, test: 20}", "--storage", tmp_path / "s"),
        *("--set", "attack.linf.sanity=null", "--set", "cluster.num_cpus=2"),
        env=env,
    )
    assert said.code == 0, said.err
    assert "test; attacks, evaluations and certificates use test" in said.err
    assert Path(said.json["report"]).is_file()
    assert (
        Path(said.json["steps"]["attack.linf"]).parent.name
        == "attack-robustbench-stand2020in-cifar10-linf"
    )


def test_mistakes_are_one_line_and_store_nothing(home, data, tmp_path, monkeypatch):
    mistake = partial(mistake_of, "certify")
    store = ("--storage", tmp_path / "s")
    both = ("--model", home / "net.pt2", "--data", data, *store)
    missing = "is missing; certify against patches with it, or in an l2 ball with --sigma"
    assert mistake(*both) == f"certify: --patch-sizes {missing}"
    assert mistake(*both, "--band", 3) == "--band: 3 needs --patch-sizes"
    assert mistake(*both, "--radii", "1") == "--radii: (1.0,) needs --sigma"
    halves = mistake(*both, "--patch-sizes", "1.5")
    assert halves == "--patch-sizes: 1.5 is not a comma-separated list of whole numbers"
    kind = mistake(*both, "--patch-sizes", 1, "--kind", "column")
    assert kind.startswith("--kind: 'column' is unknown")
    # The gate, before the model is stored: as `lint` refuses the same recipe.
    band = "is needed: model main was not trained on columns"
    assert mistake(*both, "--patch-sizes", 2) == f"--band: {band}"
    large = mistake(*both, "--patch-sizes", "2,9", "--band", 2)
    assert large == "--patch-sizes: 9 is larger than the image (8)"
    by_set = mistake(*both, "--patch-sizes", 1, "--set", "certify.patch.band=9")
    assert by_set == "options: certify.patch.band: 9 is larger than the image (8)"
    assert mistake("demo", "--sigma", 1) == (
        "--sigma: 1 cannot be combined with RECIPE, which sets it"
    )
    attack = partial(mistake_of, "attack", "--data", data, "--eps", 0.1, *store, "--model")
    assert attack(home / "weights.pt").startswith(f"--model: {home}/weights.pt holds weights with")
    assert attack(home / "nothing").startswith(f"--model: {home}/nothing does not exist; name a")
    sized = attack(home / "net.pt2", "--image-size", 9)
    assert sized == "--image-size: 9 contradicts net.pt2, which takes 8; leave it out"
    assert attack(home / "net.pt2", "--mean", "a").startswith("--mean: a is not a comma-separated")
    for one, other in (("mean", "std"), ("std", "mean")):
        half = attack(home / "net.pt2", f"--{one}", "0.5")
        assert half.startswith(f"--{one}: (0.5,) is given without {other}")
    code = f"python:{home / 'digit_net.py'}:fixed"
    assert "returns other weights at each call" in attack(code)
    assert "does not apply to a model folder" in attack(tmp_path, "--num-classes", 10)
    assert "eps: '8' is outside [0, 1]" in attack(home / "net.pt2", "--eps", 8)
    assert attack(home / "net.pt2", "--attacks", "").startswith("--attacks: '' has an empty entry")
    studied = mistake_of("analyze", *both, "--study", "lesions")
    assert "analyze" in studied
    assert not (tmp_path / "s").exists()
