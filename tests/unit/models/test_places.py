"""Models from every place: their logits, gradients, folders that build them again, refusals."""

import sys
import zipfile

import pytest
import timm
import torch
from huggingface_hub import constants
from torch import nn

from components.models.checkpoint import load_model, save_model, weights_digest
from components.models.costs import costs_of_shapes, network_of_spec
from components.models.places.load import load_any
from components.models.places.registry import ModelFacts
from pipelines import api
from tests.model_places import (
    CLASSES,
    SIDE,
    export_pt2,
    timm_config,
    trained_network,
    write_repository,
    write_robustbench,
)
from tests.refusals import refusal_of
from tests.unit.models.test_importing import hugging_face

PIXELS = {"image_size": SIDE, "channels": 1}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("places")


@pytest.fixture(scope="module")
def net(home):
    return trained_network(home)


@pytest.fixture(scope="module")
def files(home, net):
    """The same network in every form of a file."""
    export_pt2(net, home / "net.pt2")
    torch.jit.script(net).save(home / "script.pt")
    torch.jit.trace(net, torch.rand(2, 1, SIDE, SIDE)).save(home / "trace.pt")
    torch.save(net.state_dict(), home / "weights.pt")
    old = {k: v for k, v in net.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save({"state_dict": {f"module.{k}": v for k, v in old.items()}}, home / "old.tar")
    return home


def ways(files):
    code = f"python:{files / 'digit_net.py'}"
    yield str(files / "net.pt2"), {}
    yield str(files / "script.pt"), PIXELS
    yield str(files / "trace.pt"), PIXELS
    yield f"{code}:fixed", {**PIXELS, "weights": files / "weights.pt"}
    yield f"{code}:build", {**PIXELS, "weights": files / "old.tar", "num_classes": CLASSES}


def test_every_file_gives_the_network_its_gradients_and_a_folder(files, net, tmp_path):
    images = torch.rand(3, 1, SIDE, SIDE, requires_grad=True)
    expected = net(images)
    (gradient,) = torch.autograd.grad(expected[:, 3].sum(), images)
    digests = set()
    for number, (place, facts) in enumerate(ways(files)):
        model = api.load_model(place, **facts)
        assert (model.spec.num_classes, model.spec.mean) == (CLASSES, (0.0,)), place
        logits = model(images)
        assert torch.allclose(logits, expected, atol=1e-5), place
        (found,) = torch.autograd.grad(logits[:, 3].sum(), images)
        assert torch.allclose(found, gradient, atol=1e-5), place
        folder = tmp_path / str(number)
        digests.add(save_model(folder, model, recipe_digest=""))
        again = load_model(folder)
        assert torch.equal(again(images), logits), place
        if "torchscript" not in model.spec.architecture:  # which has no shapes without values
            shapes = costs_of_shapes(network_of_spec(again.spec), image_size=SIDE, channels=1)
            assert shapes.params == sum(p.numel() for p in net.parameters()), place
    assert len(digests) == 5  # source and settings count, not only weights


def test_a_digest_is_that_of_program_weights_and_settings(files, tmp_path):
    one = api.load_model(files / "net.pt2")
    other = tmp_path / "net.pt2"
    other.write_bytes((files / "net.pt2").read_bytes())
    assert weights_digest(api.load_model(other)) == weights_digest(one)
    scaled = api.load_model(files / "net.pt2", mean=[0.5], std=[0.25])
    assert weights_digest(scaled) != weights_digest(one)
    images = torch.rand(2, 1, SIDE, SIDE)
    assert torch.allclose(scaled(images), one((images - 0.5) / 0.25), atol=1e-5)


def test_a_changed_program_is_refused(tmp_path):
    torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(64, 4))).save(tmp_path / "one.pt")
    model = api.load_model(tmp_path / "one.pt", **PIXELS)
    save_model(tmp_path / "model", model, recipe_digest="")
    (program,) = (tmp_path / "model" / "code").iterdir()
    program.write_bytes(program.read_bytes() + b"0")
    from components.models.networks import program as programs

    programs._opened.clear()  # as in another process
    assert "has a modified file" in refusal_of(load_model, tmp_path / "model")


def test_attacks_and_certificates_take_a_program(files, net):
    model = api.load_model(files / "net.pt2")
    from tests.model_places import digits

    images, labels = (part[1500:1510] for part in digits())
    report = api.attack(model, images, labels, eps=0.05, attacks=["pgd-20", "apgd-ce-20"])
    assert report.robust_accuracy.value < report.clean_accuracy.value
    patch = api.certify_patch(model, images, labels, patch_sizes=[1], band=4)
    assert api.verify(patch.folder, resample=2, model=model, data=patch.data).ok


def test_studies_refuse_a_program_in_one_line(files):
    model = api.load_model(files / "net.pt2")
    images = torch.zeros(2, 1, SIDE, SIDE, dtype=torch.uint8)
    said = refusal_of(api.analyze, model, images, torch.tensor([0, 1]), lesions={})
    assert "blocks" in said


class Wrong(nn.Module):
    """Batch statistics, whatever the mode."""

    def forward(self, x):
        return (x - x.mean(0)).flatten(1)[:, :CLASSES]


def test_files_that_are_not_networks_say_what_they_are(files, net, tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "pickled.pt")
    export_pt2(net, tmp_path / "one.pt2", batch=1)
    export_pt2(net.train(), tmp_path / "training.pt2")
    net.eval()
    (tmp_path / "net.onnx").write_bytes(b"\x08\x08")
    (tmp_path / "net.pkl").write_bytes(b"\x80\x04N.")
    (tmp_path / "notes.txt").write_text("hello")
    whole = (files / "net.pt2").read_bytes()
    (tmp_path / "cut.pt2").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "end.pt2").write_bytes(whole[:-200])  # an archive inside is whole
    (tmp_path / "begun").write_bytes(whole[:500])
    (tmp_path / "empty.pt2").write_bytes(b"")
    middle = len(whole) // 2
    (tmp_path / "flipped.pt2").write_bytes(whole[:middle] + bytes(9000) + whole[middle + 9000 :])
    with zipfile.ZipFile(tmp_path / "compiled.pt2", "w") as archive:
        archive.writestr("net/data/aotinductor/model/net.so", b"")
    for path, words in {
        files / "weights.pt": "holds weights without their network; for a timm architecture",
        tmp_path / "pickled.pt": "is a pickled object, and loading it would run its code",
        tmp_path / "net.pkl": "is a pickle, and loading it would run its code",
        tmp_path / "one.pt2": "is exported for batches of 1; export it for any",
        tmp_path / "training.pt2": "was exported in training mode (batch_norm); call eval()",
        tmp_path / "net.onnx": "is an ONNX graph",
        tmp_path / "compiled.pt2": "holds compiled code (AOTInductor)",
        tmp_path / "notes.txt": "is a file of an unknown kind",
        tmp_path / "cut.pt2": "is damaged or incomplete",
        tmp_path / "end.pt2": "is damaged or incomplete",
        tmp_path / "begun": "is damaged or incomplete",
        tmp_path / "empty.pt2": "is damaged or incomplete",
        tmp_path / "flipped.pt2": "flipped.pt2 ",
        files / "digit_net.py": "is code; name what builds the network: python:",
    }.items():
        assert words in refusal_of(api.load_model, path), path
    for text, words in {
        "nowhere": "does not exist; name a model folder, timm:NAME",
        "tim:resnet18": "did you mean 'timm'?",
        "timm:": "has no name; write timm:NAME",
    }.items():
        assert words in refusal_of(api.load_model, text)


def test_what_a_file_says_is_not_asked(files):
    load = api.load_model
    assert refusal_of(load, files / "script.pt") == (
        "image_size: is missing: the side of the images in pixels"
    )
    assert "contradicts net.pt2, which takes 8" in refusal_of(load, files / "net.pt2", image_size=9)
    refused = refusal_of(load, files / "net.pt2", num_classes=3)
    assert refused.startswith("num_classes: 3 does not apply to a .pt2 or TorchScript file")
    assert "fails on an image of 1x9x9" in refusal_of(
        load, files / "script.pt", image_size=9, channels=1
    )
    for key, other in (("mean", "std"), ("std", "mean")):
        half = refusal_of(load, files / "script.pt", **PIXELS, **{key: [0.5]})
        assert half.startswith(f"{key}: [0.5] is given without {other}: images are (pixels - mean)")
        assert "is given without" in refusal_of(load, nn.Flatten(), **PIXELS, **{key: [0.5]})
    suggested = load_any(str(files / "script.pt"), suggested=ModelFacts(**PIXELS, num_classes=3))
    assert suggested.spec.num_classes == CLASSES  # it knows better than the data


class Evil:
    ran = False

    def __reduce__(self):
        return setattr, (Evil, "ran", True)


def test_pickles_inside_an_export_are_never_run(files, tmp_path):
    torch.save({"inputs": Evil()}, tmp_path / "evil.pt")
    source = zipfile.ZipFile(files / "net.pt2")
    for name in ("data/sample_inputs/model.pt", "data/constants/model_constants_config.json"):
        target = tmp_path / "evil.pt2"
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
            for entry in source.namelist():
                content = source.read(entry)
                if entry.endswith(name):
                    pickled = '{"config": {"c": {"path_name": "opaque_obj_0", "use_pickle": true}}}'
                    bad = (tmp_path / "evil.pt").read_bytes()
                    content = bad if name.endswith(".pt") else pickled.encode()
                archive.writestr(entry, content)
        assert "holds a pickled object" in refusal_of(api.load_model, target)
    assert not Evil.ran


FACTORIES = """
import torch
from digit_net import fixed

calls = []


def seeded():
    torch.manual_seed(1)
    return fixed()


def reads_a_file():
    net = fixed()
    net.load_state_dict(torch.load("weights.pt"))
    return net


def half():
    return seeded().half()


def diverged():
    net = seeded()
    torch.nn.init.constant_(net.head.bias, torch.nan)
    return net


def features():
    return fixed().features


def needy(width, *, num_classes):
    return fixed()


def counts():
    net = seeded()
    calls.append(None)
    net.scale = len(calls)
    forward = net.forward
    net.forward = lambda x: net.scale * forward(x)
    return net
"""


def test_factories_return_their_weights_or_get_them(files, monkeypatch):
    (files / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(files)
    model = api.load_model("python:factories.py:seeded", **PIXELS)
    assert model.spec.architecture.startswith("python:factories.py@")
    for name, words in {
        "fixed": "returns other weights at each call, so it has none of its own; give their file",
        "reads_a_file": "cannot be built again from its spec, as workers do: fails to build: File",
        "half": "has features.0.weight in torch.float16; convert it with float()",
        "diverged": "has values in head.bias that are not finite; look for NaN in its training",
        "counts": "built again with the same weights, it returns other logits",
        "nothing": "cannot be found: nothing is unknown",
        "features": "returned (1, 8, 8, 8) for one image, not (1, classes) logits",  # random, too
        "needy": "needs an argument width without a default, and gets only image_size, channels",
    }.items():
        known = {"num_classes": CLASSES} if name == "needy" else {}
        said = refusal_of(api.load_model, f"python:factories.py:{name}", **PIXELS, **known)
        assert words in said
        if name != "reads_a_file":  # whose error is Python's
            assert said.startswith(f"model: python:factories.py:{name} "), said
    load, build = api.load_model, "python:digit_net.py:build"
    assert refusal_of(load, build, **PIXELS).startswith("num_classes: is missing")
    known = {**PIXELS, "num_classes": CLASSES}
    assert "is not a file" in refusal_of(load, build, weights="no.pt", **known)
    other = {**known, "num_classes": 4, "weights": "weights.pt"}
    assert "differ in shape at head.weight" in refusal_of(load, build, **other)


# Hubs


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The cache of huggingface_hub, and a hub that cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    return tmp_path / "hub"


def test_a_timm_repository_is_read_by_timm(hub, tmp_path):
    config = timm_config()
    torch.manual_seed(3)
    original = timm.create_model(
        config["architecture"], num_classes=CLASSES, **config["model_args"]
    ).eval()
    write_repository(hub, "me/digits", {"config.json": config}, original.state_dict())
    model = api.load_model("hf:me/digits")
    assert (model.spec.image_size, model.spec.channels, model.spec.std) == (SIDE, 1, (0.25,))
    images = torch.rand(2, 1, SIDE, SIDE)
    assert torch.allclose(model(images), original((images - 0.5) / 0.25), atol=1e-5)
    save_model(tmp_path / "model", model, recipe_digest="")
    assert torch.equal(load_model(tmp_path / "model")(images), model(images))
    assert "mean: (0.1,) contradicts the config" in refusal_of(
        api.load_model, "hf:me/digits", mean=(0.1,), std=(0.2,)
    )


VIT = {
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "hidden_act": "gelu",
    "hidden_size": 16,
    "image_size": 16,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_channels": 3,
    "num_hidden_layers": 2,
    "patch_size": 4,
    "qkv_bias": True,
}
NORMALISED = {"do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.5, 0.5]}


def test_a_vit_of_transformers_is_read_without_transformers(hub):
    torch.manual_seed(3)
    options = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    original = timm.create_model("vit_base_patch16_224", img_size=16, num_classes=4, **options)
    state = hugging_face(original.eval().state_dict())
    write_repository(
        hub, "g/v", {"config.json": VIT, "preprocessor_config.json": NORMALISED}, state
    )
    model = api.load_model("hf:g/v")
    images = torch.rand(2, 3, 16, 16)
    mean = torch.tensor(NORMALISED["image_mean"]).view(1, 3, 1, 1)
    assert torch.allclose(model(images), original((images - mean) / 0.5), atol=1e-5)
    write_repository(hub, "g/relu", {"config.json": {**VIT, "hidden_act": "relu"}}, state)
    assert "has hidden_act relu" in refusal_of(api.load_model, "hf:g/relu")
    config = {"architectures": ["SwinForImageClassification"]}
    write_repository(hub, "g/swin", {"config.json": config}, state)
    assert "save it with torch.export" in refusal_of(api.load_model, "hf:g/swin")


def test_hubs_that_cannot_be_reached_are_told_in_one_line(hub):
    for text in ("hf:google/vit-base-patch16-224", "timm:resnet18"):
        said = refusal_of(api.load_model, text)
        assert said.startswith(f"model: {text} cannot fetch weights from http://127.0.0.1:1")
    near = refusal_of(api.load_model, "timm:resnet1")
    assert "did you mean 'resnet18' or " in near
    assert near.count("'") == 6 + 2  # three names, and the pattern of the listing
    assert len(refusal_of(api.load_model, "timm:nosuchmodel")) < 200
    said = refusal_of(api.load_model, "timm:vit_small_patch16_224.dino")
    assert "has no classes: it computes features only" in said
    assert "image_size: 8 does not apply to timm:NAME" in refusal_of(
        api.load_model, "timm:resnet18", image_size=8
    )


def test_timm_weights_come_from_its_hub(hub, monkeypatch):
    """The name, its config and the loading code are timm's; the weights are random ones."""
    torch.manual_seed(3)
    original = timm.create_model("test_vit").eval()
    write_repository(hub, "timm/test_vit.r160_in1k", {}, original.state_dict())
    model = api.load_model("timm:test_vit")
    assert (model.spec.image_size, model.spec.num_classes) == (160, 1000)
    images = torch.rand(1, 3, 160, 160)
    expected = original((images - model.mean) / model.std)
    assert torch.allclose(model(images), expected, atol=1e-5)


# RobustBench


@pytest.fixture
def robustbench(tmp_path, monkeypatch):
    """A package with the signatures of RobustBench, instead of the one that is installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "robustbench"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(write_robustbench(tmp_path)))
    monkeypatch.setenv("CASEMATE_USER_CODE", str(tmp_path / "cache" / "user_code"))
    yield tmp_path / "cache" / "robustbench"
    for name in [name for name in sys.modules if name.partition(".")[0] == "robustbench"]:
        del sys.modules[name]


def test_a_model_of_robustbench_is_loaded_by_its_package(robustbench, tmp_path, capsys):
    name = "robustbench:Stand2020In@cifar10/Linf"
    said = refusal_of(api.load_model, name)
    assert "cannot be loaded by robustbench: [Errno 2]" in said
    assert str(robustbench) in said
    place = robustbench / "cifar10" / "Linf"
    place.mkdir(parents=True)
    torch.manual_seed(3)
    head = nn.Linear(3 * 32 * 32, 10)
    torch.save({f"head.{k}": v for k, v in head.state_dict().items()}, place / "Stand2020In.pt")
    model = api.load_model(name)
    assert capsys.readouterr().out == ""  # what the package prints is not a result
    images = torch.rand(2, 3, 32, 32)
    assert torch.allclose(model(images), head(((images - 0.5) / 0.25).flatten(1)), atol=1e-5)
    save_model(tmp_path / "model", model, recipe_digest="")
    assert torch.equal(load_model(tmp_path / "model")(images), model(images))
    assert torch.equal(api.load_model("robustbench:Stand2020In")(images), model(images))
    code = tmp_path / "robustbench" / "model_zoo" / "models.py"
    code.write_text(code.read_text().replace("0.25", "0.5"))
    from components.models.networks import robustbench as networks

    networks._digest.cache_clear()  # as in another process
    assert "another version of robustbench" in refusal_of(load_model, tmp_path / "model")


def test_mistakes_about_robustbench_are_one_line(robustbench, monkeypatch):
    for text, words in {
        "Stand2020Inn": "did you mean 'Stand2020In'?",
        "Stand2020In@mnist/Linf": "has 'mnist', not one of cifar10, cifar100, imagenet",
        "Stand2020In@cifar10/linf": "has 'linf', not one of Linf, L2, corruptions",
    }.items():
        assert words in refusal_of(api.load_model, f"robustbench:{text}")
    from components.models.networks import robustbench as networks

    monkeypatch.setattr(networks, "find_spec", lambda _: None)
    assert "which is not installed here: pip install" in refusal_of(
        api.load_model, "robustbench:Stand2020In"
    )
