"""Small stand-ins of published datasets in their layouts, with random images."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from components.data.sources.names import imagenet_synsets
from components.models.checkpoint import save_model
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec

OPTIONS = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
SIDE = 16


def write_images(root: Path, places: list[str]) -> None:
    """Images that are not squares."""
    generator = np.random.default_rng(0)
    for place in places:
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (20, 16, 3), np.uint8)).save(path)


def write_imagenet_sets(root: Path) -> dict[str, Path]:
    """ImageNet-V2, -R, -C with two corruptions, and conflict stimuli, each of a few classes."""
    synsets = imagenet_synsets()
    write_images(root / "v2", [f"{label}/{n}.jpeg" for label in (1, 6, 10, 988) for n in range(3)])
    write_images(root / "r", [f"{synsets[label]}/{n}.jpg" for label in (1, 988) for n in range(4)])
    variants = [f"{name}/{level}" for name in ("fog", "snow") for level in (1, 2)]
    write_images(root / "c", [f"{v}/{synsets[i]}/a.JPEG" for v in variants for i in (1, 10)])
    write_images(root / "cue", ["cat/cat1-dog2.png", "dog/dog1-dog2.png", "dog/dog3-cat1.png"])
    return {name: root / name for name in ("v2", "r", "c", "cue")}


def write_cifar_c(root: Path, names: list[str], *, num_items: int = 6) -> Path:
    """CIFAR-10-C with some of its corruptions."""
    generator = np.random.default_rng(1)
    root.mkdir(parents=True, exist_ok=True)
    shape = (5 * num_items, 32, 32, 3)
    for name in names:
        np.save(root / f"{name}.npy", generator.integers(0, 256, shape, np.uint8))
    np.save(root / "labels.npy", np.tile(np.arange(num_items) % 10, 5))
    return root


def write_imagenet_model(folder: Path) -> Path:
    """An untrained model of 1000 classes on images of `SIDE` pixels."""
    torch.manual_seed(0)
    spec = ModelSpec("tiny_vit", 1000, 3, SIDE, (0.5,) * 3, (0.5,) * 3, options=OPTIONS)
    save_model(folder, PixelModel(spec).eval(), recipe_digest="")
    return folder
