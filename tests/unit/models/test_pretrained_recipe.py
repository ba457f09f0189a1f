"""`model.pretrained` in a recipe: what the trained model inherits, and what the run keeps of it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.core.errors import CasemateError
from components.models.checkpoint import save_model
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from pipelines.flow.plan import plan
from pipelines.recipe import build
from pipelines.recipe.load import loads
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.artifacts import StageDir

DATA = SimpleNamespace(height=16, width=16, channels=3, classes=("a", "b", "c"))
OPTIONS = "{patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}"


@pytest.fixture
def parent(tmp_path, new_model):
    save_model(tmp_path / "parent", new_model(), recipe_digest="")
    return tmp_path / "parent"


def recipe(start: object, *, model: str = "") -> Recipe:
    text = f"""
        name: child
        data: {{source: digits}}
        model: {{options: {OPTIONS}, pretrained: {start}{model}}}
        train: {{epochs: 1}}
        """
    return loads(text, source="child")


def spec_of(start: object, *, model: str = "", data: object = DATA) -> ModelSpec:
    return build.model_spec(recipe(start, model=model), data, "main")


def test_the_normalisation_is_the_parents(parent, new_spec):
    spec = spec_of(parent)
    assert (spec.mean, spec.std) == (new_spec().mean, new_spec().std)
    assert spec_of(parent, model=", mean: [0.4, 0.5, 0.6]") == spec  # agreeing is fine
    assert spec_of("null").mean == (0.5, 0.5, 0.5)


def test_timm_weights_bring_their_normalisation_too():
    model = "{architecture: deit_tiny_patch16_224, pretrained: timm}"
    text = f"name: x\ndata: {{source: digits}}\nmodel: {model}\ntrain: {{}}\n"
    spec = build.model_spec(loads(text, source="x"), DATA, "main")
    assert (spec.mean, spec.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (", mean: [0.5, 0.5, 0.5]", r"model\.mean: .* contradicts .* mean \(0\.4, 0\.5, 0\.6\)"),
        (", std: [1, 1, 1]", r"model\.std: .* contradicts"),
        (", architecture: tiny_xcit", r"model\.architecture: tiny_xcit is not that of .*tiny_vit"),
    ],
)
def test_contradictions_are_told_before_anything_is_built(parent, model, message):
    with pytest.raises(CasemateError, match=message):
        spec_of(parent, model=model)


def test_data_of_other_channels_is_told(parent):
    grey = SimpleNamespace(height=16, width=16, channels=1, classes=("a", "b"))
    with pytest.raises(CasemateError, match=r"data\.channels: 1 .*set data\.channels: 3"):
        spec_of(parent, data=grey)


def test_a_model_folder_is_named_from_anywhere(parent, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for start in ("parent", "./parent", "~/parent", parent):
        placed = build.with_absolute_paths(recipe(start))
        assert Path(placed.model.pretrained) == parent
    assert build.with_absolute_paths(recipe("timm")).model.pretrained == "timm"
    prints = {plan(recipe(start), tmp_path)[1].fingerprint for start in ("parent", "~/parent")}
    assert len(prints) == 1
    used = loads("name: x\ndata: {source: digits}\nmodel: {pretrained: ./parent}\n", source="x")
    (given,) = [step for step in plan(used, tmp_path) if step.given]
    assert given.folder.is_absolute()


@pytest.mark.parametrize("place", ["nowhere", "file.pth", "empty"])
def test_a_folder_without_a_model_is_refused_by_the_plan(tmp_path, place):
    (tmp_path / "file.pth").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CasemateError, match=rf"model\.pretrained: .*{place} is not a model folder"):
        plan(recipe(tmp_path / place), tmp_path)


def test_the_run_keeps_what_became_of_every_tensor(parent, tmp_path, monkeypatch):
    from pipelines.stages.train import results as train

    logged: list[Path] = []
    run = SimpleNamespace(artifacts=lambda *paths: logged.extend(paths))
    out = StageDir(tmp_path / "out", "train.main", "f" * 12, run)
    spec = spec_of(parent)
    train.report_start(str(parent), spec, out)
    page = json.loads((tmp_path / "out" / "pretrained.json").read_text())
    assert page["report"]["fresh"] == ["head.weight", "head.bias"]
    assert len(page["report"]["loaded"]) + 2 == len(PixelModel(spec).net.state_dict())
    assert page["parent"]["mean"] == [0.4, 0.5, 0.6]
    assert logged == [tmp_path / "out" / "pretrained.json"]

    monkeypatch.setattr(
        "pipelines.stages.train.session.load_start", pytest.fail
    )  # a resumed one loads nothing
    train.report_start(str(parent), spec, out)
