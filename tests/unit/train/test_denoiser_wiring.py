"""Denoisers in recipes: what is trained behind what, what is kept of it, and what is refused."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from components.core.errors import CasemateError
from components.denoising import settings as denoising
from components.denoising.loading import DIFFUSERS, OURS, load_denoiser, save_diffusers
from components.models.checkpoint import load_model, save_model
from components.models.zoo import DENOISERS
from components.train.objectives.denoiser import DenoiserTraining
from components.train.objectives.noise import DenoisedFineTuning
from pipelines.flow.plan import plan
from pipelines.recipe import build
from pipelines.recipe.load import loads, with_values
from pipelines.stages.train.session import make_session, objective_of

TEXT = """
name: toy
data: {source: digits}
model: {options: {patch_size: 4, embed_dim: 8, depth: 1, num_heads: 2}}
train:
  objective: {kind: denoised, sigma: 0.25, denoiser: clean}
  variants:
    plain: {objective: {kind: standard}}
    clean:
      objective: {kind: denoiser, sigmas: [0.25, 1.0], num_timesteps: 100}
      model: {architecture: tiny_unet, options: {widths: [4, 4], norm_groups: 2, head_width: 4}}
  epochs: 2
  batch_size: 8
  select: best
"""


def recipe_of(*overrides: str):
    return loads(TEXT, source="toy", overrides=overrides)


@pytest.fixture
def trained(toy, tmp_path):
    """The folder of the recipe's denoiser after its training, and the session."""
    session = make_session(recipe_of(), "clean", toy)
    while not session.finished:
        session.run_epoch()
    save_model(tmp_path / "step" / "model", session.final_model(), recipe_digest="none")
    return tmp_path / "step", session


def test_a_denoiser_is_trained_selected_and_kept_with_its_levels(trained, toy):
    folder, session = trained
    assert isinstance(session.objective, DenoiserTraining)
    errors = [row["val_mse"] for row in session.history]
    assert all(0 < error < 1 for error in errors)
    assert session.selected_epoch == errors.index(min(errors))  # the lowest is the best
    assert session.selection.best_value == -min(errors)
    row = session.history[-1]
    assert row["val_accuracy"] is None
    assert row["train_accuracy"] is None
    header = json.loads((folder / "model" / "model.json").read_text())
    scheduler = header["spec"]["trained_for"]["diffusion"]["scheduler"]
    assert (scheduler["beta_schedule"], scheduler["num_train_timesteps"]) == (
        "squaredcos_cap_v2",
        100,
    )
    denoiser = load_denoiser(f"model:{folder / 'model'}")
    assert denoiser.channels == 1
    net = load_model(folder / "model").net
    x, times = torch.zeros(1, 1, 8, 8), torch.tensor([3.0])
    weights = denoiser.network.state_dict().values()
    assert all(map(torch.equal, weights, net.state_dict().values()))
    # Where the weights lie in memory moves the last bits of convolutions on some processors.
    torch.testing.assert_close(denoiser.network(x, times), net(x, times), atol=1e-5, rtol=1e-5)


def test_selection_keeps_the_lowest_error(toy, monkeypatch):
    session = make_session(recipe_of("train.epochs=3"), "clean", toy)
    given = iter([0.3, 0.1, 0.2])
    monkeypatch.setattr("components.train.session.validation_score", lambda *a, **k: next(given))
    while not session.finished:
        session.run_epoch()
    assert session.selected_epoch == 1


def test_an_interrupted_denoiser_goes_on_as_if_nothing_had_been(toy):
    whole = make_session(recipe_of(), "clean", toy)
    first = whole.run_epoch()
    again = make_session(recipe_of(), "clean", toy)
    again.restore(deepcopy(whole.state()))
    expected, second = whole.run_epoch(), again.run_epoch()
    assert first["val_mse"] != expected["val_mse"]
    assert (second["loss"], second["val_mse"]) == (expected["loss"], expected["val_mse"])


def test_a_classifier_is_tuned_behind_the_denoiser_of_its_recipe(trained, toy):
    folder, _ = trained
    placed = build.with_absolute_paths(recipe_of(), {"train.clean": folder})
    session = make_session(placed, "main", toy)
    assert isinstance(session.objective, DenoisedFineTuning)
    row = session.run_epoch()
    assert row["val_accuracy"] is not None
    spec = build.model_spec(placed, toy, "main")
    digest = json.loads((folder / "model" / "model.json").read_text())["digest"]
    assert spec.trained_for["denoiser"] == digest  # no place on this machine
    with pytest.raises(CasemateError, match=r"denoiser: clean is not trained yet"):
        objective_of(recipe_of(), "main")
    weak = with_values(placed, {"train.objective.sigma": 0.001})
    with pytest.raises(CasemateError, match=r"sigma: 0\.001 is outside the denoiser's schedule"):
        objective_of(weak, "main")


def test_the_plan_trains_denoisers_before_what_stands_behind_them(tmp_path):
    steps = {step.name: step for step in plan(recipe_of(), tmp_path)}
    assert steps["train.main"].step.needs == ("prepare", "train.clean")
    assert list(steps).index("train.main") > list(steps).index("train.clean")
    assert [name for name, step in steps.items() if step.step.waits] == ["train.main"]

    def prints(*overrides):
        return {s.name: s.fingerprint for s in plan(recipe_of(*overrides), tmp_path)}

    base, other = prints(), prints("train.variants.clean.objective.sigmas=[0.5]")
    changed = {name for name in base if base[name] != other[name]}
    assert changed == {"train.clean", "train.main", "evaluate.clean", "report"}
    wider = prints("train.variants.clean.model.options.widths=[4, 8]")
    assert {name for name in base if base[name] != wider[name]} == changed


def test_a_denoiser_on_disk_counts_by_its_content(trained, tmp_path):
    denoiser = load_denoiser(f"model:{trained[0] / 'model'}")
    prints = []
    for name in "ab":
        save_diffusers(tmp_path / name, denoiser)
        recipe = recipe_of(f"train.objective.denoiser=diffusers:{tmp_path / name}")
        steps = {step.name: step for step in plan(recipe, tmp_path)}
        assert steps["train.main"].step.needs == ("prepare",)
        prints.append(steps["train.main"].fingerprint)
    assert prints[0] == prints[1]


def test_paths_become_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    placed = build.with_absolute_paths(recipe_of("train.objective.denoiser=diffusers:here/it"))
    assert placed.train.objective.denoiser == f"diffusers:{Path.cwd() / 'here/it'}"


def test_words_are_the_same_in_both_rooms():
    assert set(denoising.ARCHITECTURES) == set(DENOISERS)
    assert set(denoising.SOURCES) == {OURS, DIFFUSERS}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.objective.denoiser=plain",
            r"train\.objective\.denoiser: plain is neither a variant",
        ),
        ("train.objective.denoiser=hub:name", r"denoiser: 'hub:name' is neither"),
        ("train.objective.sigma=25", r"sigma: 25 is outside \(0, 1\]"),
        ("train.variants.clean.model=null", r"model\.architecture: tiny_vit is not a network"),
        (
            "model.architecture=unet",
            r"model\.architecture: unet is not a network for a classifier",
        ),
        ("train.variants.clean.model.mean=[0.1]", r"clean\.model: of a denoiser takes only arch"),
        ("train.variants.clean.objective.full=true", r"give exactly one of sigmas"),
        ("train.variants.clean.objective.sigmas=[]", r"give exactly one of sigmas"),
        (
            "train.variants.clean.objective={kind: denoiser, range: [1.0, 0.5]}",
            r"range: \[1\.0, 0\.5\] must rise",
        ),
        (
            "attack.linf={eps: 0.1, attacks: [{kind: pgd}], models: [clean]}",
            r"attack\.linf\.models: clean is a denoiser",
        ),
        (
            "certify.l2={kind: gaussian, sigma: 0.25, model: clean}",
            r"certify\.l2\.model: clean is a denoiser",
        ),
    ],
)
def test_mistakes_are_one_line_each(override, message):
    with pytest.raises(CasemateError, match=message) as caught:
        recipe_of(override)
    assert all(line.startswith("toy: ") for line in str(caught.value).splitlines())
