"""First recipes: clean for every task and layout, true to the images, never in place of a file."""

from itertools import product

import pytest
import yaml
from torch import nn

from components.core.errors import CasemateError
from components.data.sources import open_source
from components.data.sources.recognition import recognise
from components.models.checkpoint import save_model
from pipelines import api
from pipelines.recipe.commented import Said, commented_yaml
from pipelines.recipe.starting.facts import TASKS
from tests import image_folders as folders


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The place of each layout, made once."""
    root = tmp_path_factory.mktemp("layouts")
    made = {name: make(root / name) for name, make in folders.LAYOUTS.items()}
    return {**made, "prepared": folders.prepared(root / "prepared"), "digits": "digits"}


@pytest.mark.parametrize(
    ("layout", "task"), list(product([*folders.LAYOUTS, "prepared", "digits"], TASKS))
)
def test_recipes_lint_clean_and_shrink(data, layout, task, tmp_path):
    made = api.init(task, data=data[layout], out=tmp_path / "mine.yaml")
    assert api.lint(made.file) == []
    api.lint(made.file, smoke=True)  # accepted; few steps are pointed out
    recipe = api.load_recipe(made.file)
    assert recipe.name == "mine"
    assert bool(recipe.attack) == (task != "certify")
    assert bool(recipe.certify) == (task == "certify")
    assert bool(recipe.tune) == (task == "tune")
    assert recipe.data.image_size == made.found["image_size"]
    assert sum(made.found["splits"].values()) == made.found["num_items"]


@pytest.mark.parametrize(
    ("layout", "size", "fit", "architecture", "patch", "eps"),
    [
        ("digits", 8, "pad", "tiny_vit", 2, 0.1),
        ("npz", 16, "pad", "tiny_vit", 4, 8 / 255),
        ("parquet", 16, "pad", "tiny_vit", 4, 0.1),
        ("idx", 28, "pad", "tiny_vit", 4, 0.1),
        ("cifar10", 32, "pad", "tiny_vit", 4, 8 / 255),
        ("mixed_sizes", 48, "resize", "tiny_vit", 4, 8 / 255),
        ("photographs", 224, "crop", "vit_small_patch16_224", None, 4 / 255),
    ],
)
def test_sizes_networks_and_budgets_suit_the_images(
    data, layout, size, fit, architecture, patch, eps, tmp_path
):
    made = api.init("train", data=data[layout], out=tmp_path / "mine.yaml")
    recipe = api.load_recipe(made.file)
    assert (recipe.data.image_size, recipe.data.fit) == (size, fit)
    assert recipe.model.architecture == architecture
    assert recipe.model.options.get("patch_size") == patch
    assert recipe.attack["linf"].eps == recipe.train.objective.eps == pytest.approx(eps)


@pytest.mark.parametrize("side", [1, 5, 8, 9, 15, 31, 33, 50, 63, 64, 75, 96, 159, 160, 224, 300])
@pytest.mark.parametrize("task", ["train", "certify"])
def test_every_side_has_a_network_that_tiles_it(tmp_path, side, task):
    folders.class_folders(tmp_path / "d", {"a": 6, "b": 6}, height=side, width=side, channels=1)
    made = api.init(task, data=tmp_path / "d", out=tmp_path / "mine.yaml")
    recipe = api.load_recipe(made.file)
    assert api.lint(made.file) == []
    patch = recipe.model.options.get("patch_size", 16)
    assert recipe.data.image_size % patch == 0
    assert recipe.data.image_size >= min(side, 224)


def test_shares_grow_until_no_split_is_empty(tmp_path):
    folders.class_folders(tmp_path / "d", {"a": 4, "b": 4})
    made = api.init(data=tmp_path / "d", out=tmp_path / "mine.yaml")
    assert min(made.found["splits"].values()) >= 2
    folders.class_folders(tmp_path / "few", {"a": 1, "b": 1})
    with pytest.raises(CasemateError, match="too few images"):
        api.init(data=tmp_path / "few", out=tmp_path / "none.yaml")
    assert not (tmp_path / "none.yaml").exists()


def test_two_classes_get_attacks_that_two_classes_allow(data, tmp_path):
    made = api.init("attack", data=data["with_splits"], out=tmp_path / "mine.yaml")
    kinds = [entry.kind for entry in api.load_recipe(made.file).attack["linf"].attacks]
    assert kinds == ["apgd-ce", "fab", "square"]
    made = api.init("attack", data=data["flat"], out=tmp_path / "mine.yaml", force=True)
    kinds = [entry.kind for entry in api.load_recipe(made.file).attack["linf"].attacks]
    assert kinds == ["autoattack"]


def test_native_splits_are_not_carved(data, tmp_path):
    text = api.init(data=data["with_splits"], out=tmp_path / "mine.yaml").text
    assert "fraction" not in text
    text = api.init(data=data["npz"], out=tmp_path / "mine.yaml", force=True).text
    assert "val_fraction" in text
    assert "test_fraction" not in text


def test_unreadable_images_are_skipped_by_the_recipe(tmp_path):
    folders.flat(tmp_path / "d")
    (tmp_path / "d" / "cat" / "000.png").write_bytes(b"broken")
    made = api.init(data=tmp_path / "d", out=tmp_path / "mine.yaml")
    assert api.load_recipe(made.file).data.on_error == "skip"
    assert made.found["unreadable"] == ["folder-cat/000.png"]
    assert "cannot be read" in made.text


def test_every_key_is_explained(data, tmp_path):
    for task in TASKS:
        text = api.init(task, data=data["flat"], out=tmp_path / "mine.yaml", force=True).text
        body = text[text.index("\nname:") + 1 :].splitlines()
        plain = [line for line in body if "#" not in line]
        assert {line.strip().partition(":")[0] for line in plain} <= {
            *("model", "certify", "linf", "models", "train")
        }
        assert max(map(len, text.splitlines())) <= 200


def test_equal_images_give_equal_bytes(data, tmp_path):
    first = api.init(data=data["flat"], out=tmp_path / "mine.yaml").text
    assert api.init(data=data["flat"], out=tmp_path / "mine.yaml", force=True).text == first


def test_names_of_files_cannot_leave_a_comment(tmp_path):
    root = tmp_path / "a\nseed: 9\n# b"
    folders.class_folders(root, {"x\nseed: 7": 1, "y: # z": 40, "n": 40})
    made = api.init(data=root, out=tmp_path / "mine.yaml")
    recipe = api.load_recipe(made.file)
    assert recipe.seed == 0
    assert recipe.data.path == str(root)


def test_comments_never_change_the_values():
    values = {"a": "x # y", "b": "null", "c": ["8/255", 1e-5], "d": None, "e": "ü\nz"}
    text = commented_yaml({k: Said(v, "c\nf: 1") for k, v in values.items()}, head=["h\ng: 2"])
    assert yaml.safe_load(text) == {**values, "c": ["8/255", 1e-5]}


# -- a given model


def given(folder, *, image_size=32, num_classes=4, trained_for=None):
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, num_classes))
    model = api.load_model(network, image_size=image_size)
    object.__setattr__(model.spec, "trained_for", trained_for or {})
    save_model(folder, model, recipe_digest="")
    return folder


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    return path


@pytest.mark.parametrize("task", ["attack", "certify"])
def test_a_given_model_is_named_and_decides_the_size(data, folder, task, tmp_path):
    given(folder, image_size=24)
    made = api.init(task, data=data["flat"], model=folder, out=tmp_path / "mine.yaml")
    recipe = api.load_recipe(made.file)
    assert recipe.train is None
    assert recipe.model.pretrained == str(folder)
    assert (recipe.data.image_size, recipe.data.fit, recipe.data.channels) == (24, "resize", 3)
    assert api.lint(made.file) == []
    assert ("expect few certificates" in made.text) == (task == "certify")


def test_a_certificate_suits_the_training_of_the_model(data, folder, tmp_path):
    given(folder, trained_for={"kind": "gaussian", "sigma": 0.5})
    made = api.init("certify", data=data["flat"], model=folder, out=tmp_path / "mine.yaml")
    assert api.load_recipe(made.file).certify["l2"].sigma == 0.5
    given(folder, trained_for={"kind": "columns", "band": 4})
    made = api.init("certify", data=data["flat"], model=folder, out=tmp_path / "b.yaml")
    assert api.load_recipe(made.file).certify["patch"].kind == "columns"
    assert made.notices == ()


def test_a_model_of_other_classes_is_refused(data, folder, tmp_path):
    given(folder, num_classes=7)
    with pytest.raises(CasemateError, match="classes"):
        api.init("attack", data=data["flat"], model=folder, out=tmp_path / "mine.yaml")
    assert not (tmp_path / "mine.yaml").exists()


def test_test_images_alone_are_for_given_models(tmp_path, folder):
    folders.class_folders(tmp_path / "d", {"a": 5, "b": 5, "c": 5, "d": 5}, split="test")
    with pytest.raises(CasemateError, match="needs --model"):
        api.init("attack", data=tmp_path / "d", out=tmp_path / "mine.yaml")
    made = api.init("attack", data=tmp_path / "d", model=given(folder), out=tmp_path / "mine.yaml")
    assert made.found["splits"] == {"test": 20}
    assert api.lint(made.file) == []


# -- refusals


def test_class_folders_beside_other_folders_are_told(tmp_path):
    root = folders.class_folders(tmp_path / "d" / "photos", {"a": 3, "b": 3}, height=8, width=8)
    folders.save(tmp_path / "d" / "drafts" / "one.png", folders.pixels(0, 0, 8, 8))
    with pytest.raises(CasemateError) as error:
        api.init("train", data=tmp_path / "d", out=tmp_path / "mine.yaml")
    said = str(error.value)
    assert said.startswith(f"--data: {root} is not a class: it holds folders of images")
    assert said.endswith("name this folder")


@pytest.mark.parametrize("inner", ["photos", "archive/photos", "photos/train"])
def test_a_folder_around_the_class_folders_is_told(inner, tmp_path):
    folders.class_folders(tmp_path / "d" / inner, {"a": 3, "b": 3}, height=8, width=8)
    (tmp_path / "d" / "__MACOSX").mkdir()
    classes = inner.removesuffix("/train")  # which is found there as a split
    with pytest.raises(CasemateError) as error:
        api.init("train", data=tmp_path / "d", out=tmp_path / "mine.yaml")
    named = f"the class folders are in {tmp_path / 'd' / classes}: name that one"
    assert str(error.value) == f"--data: {tmp_path / 'd'} holds one folder, and {named}"
    with pytest.raises(CasemateError, match="name that one"):
        open_source("folder", path=str(tmp_path / "d"), options={})
    assert recognise(str(tmp_path / "d" / classes)).source == "folder"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"task": "fly"}, "--task: fly is unknown"),
        ({"task": "train", "model": "m"}, "--model: m does not apply to train"),
        ({"look": -1}, "--look: -1"),
        ({"out": "mine.txt"}, "ends in neither .yaml nor .yml"),
        ({"out": "no/such/mine.yaml"}, "is not a folder"),
        ({"task": "attack", "model": "timm:resnet18"}, "is not a model folder"),
        ({"task": "attack", "model": "nowhere"}, "nowhere"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(how, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CasemateError) as error:
        api.init(**how)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_overwritten_with_force_only(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    with pytest.raises(CasemateError, match="--force"):
        api.init(out=path)
    assert path.read_text() == "mine"
    assert api.init(out=path, force=True).file == path
    assert path.read_text().startswith("# A first recipe")
