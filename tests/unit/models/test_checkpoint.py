"""Model folders: the same logits back, or a refusal that names the file."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.core.errors import CasemateError
from components.models.checkpoint import load_model, read_header, save_model, weights_digest


@pytest.mark.parametrize("architecture", ["tiny_vit", "tiny_xcit"])
def test_a_saved_model_gives_the_same_logits(tmp_path, new_model, images, architecture):
    model = new_model(architecture)
    digest = save_model(tmp_path, model, recipe_digest="r" * 64)
    loaded = load_model(tmp_path)
    assert not loaded.training
    assert loaded.spec == model.spec
    assert torch.equal(loaded(images), model(images))
    assert weights_digest(loaded) == digest == read_header(tmp_path)["digest"]
    assert read_header(tmp_path)["recipe_digest"] == "r" * 64
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.safetensors"]


def test_the_digest_follows_weights_and_spec(new_model):
    digests = {
        weights_digest(new_model()),
        weights_digest(new_model(token_policy="drop")),
        weights_digest(new_model(mean=(0.1, 0.5, 0.6))),
    }
    nudged = new_model()
    with torch.no_grad():
        nudged.net.head.bias[0] = torch.nextafter(nudged.net.head.bias[0], torch.tensor(9.0))
    digests.add(weights_digest(nudged))
    assert len(digests) == 4
    assert weights_digest(new_model()) == weights_digest(new_model())


@pytest.mark.parametrize("damage", ["nudged", "flipped", "cut", "gone", "foreign"])
def test_damaged_weights_are_refused_by_name(tmp_path, new_model, damage):
    save_model(tmp_path, new_model(), recipe_digest="")
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "nudged":
        state = load_file(path)
        state["head.bias"][0] += 1
        save_file(state, path)
    elif damage == "flipped":
        content[-3] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-8])
    elif damage == "gone":
        path.unlink()
    else:
        save_file({"other": torch.zeros(1)}, path)
    with pytest.raises(CasemateError, match=r"model\.safetensors"):
        load_model(tmp_path)


def test_a_changed_spec_is_refused(tmp_path, new_model):
    """The policy is part of the claim: nobody may flip it below a certificate."""
    save_model(tmp_path, new_model(token_policy="mask"), recipe_digest="")
    header = json.loads((tmp_path / "model.json").read_text())
    header["spec"]["token_policy"] = "drop"
    (tmp_path / "model.json").write_text(json.dumps(header))
    with pytest.raises(CasemateError, match="has digest"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no model.json"),
        ("{", "is not valid JSON"),
        ('{"format": 99}', "has format 99"),
    ],
)
def test_unreadable_headers_are_explained(tmp_path, text, message):
    if text is not None:
        (tmp_path / "model.json").write_text(text)
    with pytest.raises(CasemateError, match=message):
        load_model(tmp_path)
