"""l2 certificates behind a denoiser, through the stage without Ray: votes, checks, refusals."""

import json
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from components.certify.tasks import VoteTask
from components.certify.verify import verify
from components.certify.vote_rows import VOTES_NAME
from components.certify.votes import HEADER_KEY, read_votes
from components.core.digests import canonical_json
from components.core.errors import CasemateError
from components.core.seeding import standard_normal
from components.core.tables import write_table
from components.data.prepared import PreparedDataset
from components.denoising.diffusion import Diffusion
from components.denoising.importing import denoiser_spec
from components.denoising.loading import (
    load_denoiser,
    save_diffusers,
    source_digest,
)
from components.denoising.samplers import make_sampler
from components.models.checkpoint import load_model, read_header, save_model
from components.models.pixels import PixelModel
from components.models.resizing import resized
from pipelines.flow.plan import plan, steps_of
from pipelines.recipe import lint
from pipelines.recipe.check import check
from pipelines.recipe.costs import Hardware, Question, rows_of
from pipelines.recipe.facts import Facts
from pipelines.recipe.load import parse, with_values
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.certify import challenge
from pipelines.stages.certify import stage as certify
from pipelines.stages.certify.cost import costs_of
from pipelines.stages.certify.resample import resample
from tests.unit.pipelines.conftest import FakeRun, InProcess

SIGMA, MICRO, SIDE = 0.25, 4, 8
UNET = {"widths": [4, 8], "norm_groups": 2, "head_width": 4}
SECTION = {
    "kind": "gaussian", "denoiser": "cleaner", "sigma": SIGMA, "num_select": 6, "num_estimate": 22,
    "block_size": 8, "micro_batch": MICRO, "num_items": 3, "radii": [0.1], "failure_prob": 0.1,
}  # fmt: skip
SAMPLERS = {
    "one-shot": {"kind": "one-shot"},
    "ancestral": {"kind": "ancestral", "num_steps": 3},
    "heun": {"kind": "heun", "num_levels": 3},
}


def made_denoiser(folder, *, channels=1, seed=0):
    torch.manual_seed(seed)
    spec = denoiser_spec(
        architecture="tiny_unet", channels=channels, image_size=SIDE, options=UNET,
        diffusion=Diffusion.named("linear", 1000),
    )  # fmt: skip
    save_model(folder / "model", PixelModel(spec).eval(), recipe_digest="")
    return folder


@pytest.fixture(scope="module")
def cleaner(tmp_path_factory):
    return made_denoiser(tmp_path_factory.mktemp("cleaner"))


def recipe_of(section, **changes):
    train = {"variants": {"cleaner": {
        "objective": {"kind": "denoiser", "range": [0, 0.5]},
        "model": {"architecture": "tiny_unet", "options": UNET},
    }}}  # fmt: skip
    values = {"name": "x", "seed": 5, "data": {"source": "digits"}, "train": train}
    return parse({**values, "certify": {"l2": {**SECTION, **section}}, **changes}, source="x")


@pytest.fixture(scope="module")
def run(prepared, models, cleaner, tmp_path_factory):
    def certified(section, *, executor=None, recipe=None, **more):
        inputs = {"prepare": prepared, "train.main": models["plain"], "train.cleaner": cleaner}
        inputs |= more
        out = StageDir(
            tmp_path_factory.mktemp("certify"), "certify.l2", "f" * 64, FakeRun(), inputs
        )
        work = executor or InProcess()
        with (
            mock.patch.object(certify, "run_units", work),
            mock.patch.object(challenge, "run_units", work),
        ):
            certify.run(recipe or recipe_of(section), inputs, out)
        return out

    return certified


@pytest.mark.parametrize("name", SAMPLERS)
def test_votes_are_those_of_noise_denoise_classify(run, prepared, models, cleaner, name):
    """Every draw again, by hand: its own noise, its own normals for the sampler, one pass each."""
    out = run({"sampler": SAMPLERS[name]})
    classifier = load_model(models["plain"] / "model")
    denoiser = load_denoiser(f"model:{cleaner / 'model'}")
    sampler = make_sampler(SAMPLERS[name], denoiser)
    items = PreparedDataset.open(prepared).load("test")
    votes = {item.item_id: item.streams for item in read_votes(out.path / "votes.parquet").items()}
    assert len(votes) == 3
    shape = (1, SIDE, SIDE)
    item_id = items.item_ids[0]
    image = items.pixels()[0]

    def normals(stream, low, high):
        rows = [standard_normal(5, stream, item_id, i, shape) for i in range(low, high)]
        return torch.from_numpy(np.stack(rows + rows[:1] * (MICRO - len(rows))))

    for stream, count in (("select", 6), ("estimate", 22)):
        found = []
        for low in range(0, count, MICRO):
            high = min(low + MICRO, count)
            noisy = image + SIGMA * normals(stream, low, high)
            clean = sampler(
                noisy,
                SIGMA,
                lambda step, s=stream, a=low, b=high: normals(f"denoise-{s}-{step}", a, b),
            )
            with torch.inference_mode():
                found += classifier(clean).argmax(dim=1)[: high - low].tolist()
        assert votes[item_id][stream].tolist() == found


def on_disk(task):
    """Test items that do not fit into memory."""
    return PreparedDataset.open(task.dataset).lazy("test", cache_shards=1)


def rewrite_header(path, name, value):
    votes = read_votes(path)
    told = {**votes.header.settings["denoiser"], name: value}
    header = {**votes.header.to_dict(), "settings": {**votes.header.settings, "denoiser": told}}
    write_table(path, votes.source.replace_schema_metadata({HEADER_KEY: canonical_json(header)}))


def test_the_certificate_names_the_denoiser_and_can_be_checked(
    run, prepared, models, cleaner, tmp_path
):
    out = run({"sampler": SAMPLERS["ancestral"], "challenge": {"eps": 0.1, "num_items": 2,
               "num_steps": 1, "num_draws": 2, "num_predict": 20}})  # fmt: skip
    evidence = json.loads((out.path / "certificate.json").read_text())["evidence"]
    said = evidence["settings"]["denoiser"]
    assert said["digest"] == read_header(cleaner / "model")["digest"]
    assert said["sampler"] == {**SAMPLERS["ancestral"], "start": "exact"}
    assert said["sigma_added"] >= SIGMA
    assert said["timestep"] == pytest.approx(144.154, abs=1e-3)  # linear schedule, 1000 steps
    assert evidence["model_digest"] == read_header(models["plain"] / "model")["digest"]
    assert verify(out.path).ok
    (registered,) = out.run.registered
    assert registered["denoiser"] == cleaner / "model"
    folders = {"prepare": prepared, "train.cleaner": cleaner, "train.main": models["plain"]}
    manifest = {"input_folders": {name: str(path) for name, path in folders.items()}, "files": {}}
    (out.path / "manifest.json").write_text(json.dumps(manifest))
    places = {"model": None, "data": None}
    assert resample(out.path, count=3, **places) == []
    with mock.patch.object(VoteTask, "items", on_disk):
        assert resample(out.path, count=1, **places) == []
    original = (out.path / VOTES_NAME).read_bytes()
    for name, value in {"timestep": 3.0, "prediction": "sample", "sigma_added": 0.1}.items():
        rewrite_header(out.path / VOTES_NAME, name, value)
        (problem,) = resample(out.path, count=1, **places)
        assert f"records {value!r} as {name} of the denoiser" in problem
        assert any("was added, not of" in p for p in verify(out.path).problems) == (
            name == "sigma_added"
        )
        (out.path / VOTES_NAME).write_bytes(original)
    other = made_denoiser(tmp_path, seed=1)
    with pytest.raises(CasemateError, match=r"^verify --denoiser: .* the votes are of"):
        resample(out.path, count=1, denoiser=other / "model", **places)


def test_any_order_of_units_gives_the_same_bytes(run):
    forwards = run({"sampler": SAMPLERS["ancestral"]})
    backwards = run({"sampler": SAMPLERS["ancestral"]}, executor=InProcess(lambda todo: todo[::-1]))
    for name in ("votes.parquet", "certificates.parquet", "certificate.json"):
        assert (forwards.path / name).read_bytes() == (backwards.path / name).read_bytes()


def test_a_given_classifier_at_another_side(run, cleaner, models, prepared, tmp_path):
    """Neither it nor the denoiser were trained here; images are 8 x 8, it looks at 16 x 16."""
    spec = replace(load_model(models["plain"] / "model").spec, image_size=16)
    torch.manual_seed(3)
    larger = PixelModel(spec).eval()
    save_model(tmp_path / "larger", larger, recipe_digest="")
    denoiser = load_denoiser(f"model:{cleaner / 'model'}")
    save_diffusers(tmp_path / "theirs", denoiser)
    source = f"diffusers:{tmp_path / 'theirs'}"
    recipe = recipe_of(
        {"denoiser": source}, train=None, model={"pretrained": str(tmp_path / "larger")}
    )
    steps = {step.name: step for step in plan(recipe, tmp_path)}
    needs = steps["certify.l2"].step.needs
    assert needs == ("prepare", "model.main", "denoiser.l2")
    assert steps["denoiser.l2"].given
    out = run(None, recipe=recipe, **{need: steps[need].folder for need in needs[1:]})
    said = read_votes(out.path / "votes.parquet").header.settings["denoiser"]
    assert said["digest"] == source_digest(source)
    items = PreparedDataset.open(prepared).load("test")
    noise = [standard_normal(5, "select", items.item_ids[0], i, (1, 8, 8)) for i in range(MICRO)]
    noisy = items.pixels()[0] + SIGMA * torch.from_numpy(np.stack(noise))
    sampler = make_sampler({"kind": "one-shot"}, denoiser)
    with torch.inference_mode():
        logits = larger(resized(sampler(noisy, SIGMA, lambda step: None), 16))
    votes = {i.item_id: i.streams for i in read_votes(out.path / "votes.parquet").items()}
    assert votes[items.item_ids[0]]["select"][:MICRO].tolist() == logits.argmax(dim=1).tolist()


def test_the_fingerprint_follows_the_denoiser_not_its_place(cleaner, tmp_path):
    denoiser = load_denoiser(f"model:{cleaner / 'model'}")
    prints = []
    for name in ("a", "b"):
        save_diffusers(tmp_path / name, denoiser)
        recipe = recipe_of({"denoiser": f"diffusers:{tmp_path / name}"})
        prints.append({s.name: s.fingerprint for s in plan(recipe, tmp_path)}["certify.l2"])
    assert prints[0] == prints[1]
    other = load_denoiser(f"model:{made_denoiser(tmp_path / 'other', seed=1) / 'model'}")
    save_diffusers(tmp_path / "c", other)
    recipe = recipe_of({"denoiser": f"diffusers:{tmp_path / 'c'}"})
    assert {s.name: s.fingerprint for s in plan(recipe, tmp_path)}["certify.l2"] != prints[0]
    trained = {step.name: step for step in steps_of(recipe_of({}))}
    assert trained["certify.l2"].needs == ("prepare", "train.main", "train.cleaner")


def test_certificates_without_a_denoiser_keep_their_fingerprints():
    (step,) = [s for s in steps_of(recipe_of({"denoiser": None})) if s.stage == "certify"]
    assert not {"denoiser", "sampler"} & step.identity["certify"].keys()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"denoiser": "main"}, r"certify\.l2\.denoiser: main is neither a variant"),
        ({"denoiser": "gone"}, r"certify\.l2\.denoiser: gone is neither a variant"),
        ({"denoiser": "hub:x"}, r"certify\.l2\.denoiser.*diffusers:PATH"),
        ({"denoiser": None, "sampler": {"kind": "heun"}}, "needs a denoiser"),
        ({"sampler": {"kind": "heun", "last": 1.0}}, r"sampler\.last: 1\.0 is not below"),
        ({"challenge": {"eps": 0.1, "num_predict": 2}}, r"challenge\.num_predict: 2 draws"),
        ({"sampler": {"kind": "heun", "num_levels": 1}}, r"certify\.l2\.sampler\.num_levels"),
        ({"sampler": {"kind": "heun", "num_steps": 3}}, r"certify\.l2\.sampler\.num_steps"),
    ],
)  # fmt: skip
def test_mistakes_in_the_section_are_refused_in_one_line(section, said):
    with pytest.raises(CasemateError, match=said) as caught:
        recipe_of(section)
    assert "\n" not in str(caught.value)


def test_noise_and_channels_that_do_not_fit_are_refused_before_training(cleaner, run, tmp_path):
    with pytest.raises(CasemateError, match=r"^x: certify\.l2\.sigma: 0\.0001 is outside the deno"):
        check(recipe_of({"sigma": 0.0001, "radii": [0.00005]}))
    source = f"model:{cleaner / 'model'}"
    coloured = recipe_of({"denoiser": source}, data={"source": "digits", "channels": 3})
    with pytest.raises(CasemateError, match=r"^x: certify\.l2\.denoiser: 1 input chan.* have 3"):
        lint.warnings_of(coloured)
    with pytest.raises(CasemateError, match=r"^x: certify\.l2\.denoiser: 1 input chan.* have 3"):
        check(
            recipe_of({"denoiser": source}), Facts(height=SIDE, width=SIDE, channels=3)
        )  # as prepared
    three = made_denoiser(tmp_path / "three", channels=3)
    with pytest.raises(CasemateError, match=r"^certify\.l2\.denoiser: 3 input chan.* have 1"):
        run({}, **{"train.cleaner": three})


def test_what_was_trained_on_something_else_is_warned_about():
    def warned(section, objective):
        recipe = with_values(recipe_of(section), {"train.objective": objective})
        return [w.message for w in lint.warnings_of(recipe) if w.key.startswith("certify.l2")]

    plain = {"kind": "standard"}
    behind = {"kind": "denoised", "sigma": SIGMA, "denoiser": "cleaner"}
    assert warned({}, plain) == []
    assert warned({}, behind) == []
    assert "not a noise level that cleaner" in warned({"sigma": 0.75, "radii": [0.1]}, plain)[0]
    assert "trained behind one" in warned({"denoiser": None}, behind)[0]
    assert "removes the noise" in warned({}, {"kind": "gaussian", "sigma": SIGMA})[0]
    assert "not trained on Gaussian" in warned({"denoiser": None}, plain)[0]


def test_an_estimate_counts_every_pass_of_the_denoiser(cleaner, tmp_path):
    def flops(section):
        data = {"source": "digits", "image_size": SIDE, "channels": 1}
        hardware = Hardware(accelerators=["A100"], dtype="fp32", num_workers=1)
        (row,) = rows_of(costs_of(recipe_of(section, data=data), Question(num_items=3)), hardware)
        return row["flops"]

    alone, once = flops({"denoiser": None}), flops({})
    assert flops({"sampler": SAMPLERS["heun"]}) - alone == pytest.approx(5 * (once - alone))
    assert flops({"sampler": SAMPLERS["ancestral"]}) - alone == pytest.approx(3 * (once - alone))
    lower = SAMPLERS["ancestral"] | {"start": "reference"}  # leaves out the level of sigma itself
    assert flops({"sampler": lower}) - alone == pytest.approx(2 * (once - alone))
    save_diffusers(tmp_path / "theirs", load_denoiser(f"model:{cleaner / 'model'}"))
    assert flops({"denoiser": f"diffusers:{tmp_path / 'theirs'}"}) == once
    with pytest.raises(CasemateError, match=r"certify\.l2\.denoiser: .* what it costs is unknown"):
        flops({"denoiser": f"diffusers:{tmp_path / 'gone'}"})
