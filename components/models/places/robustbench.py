"""Models of RobustBench, loaded by its own package."""

import sys
from contextlib import redirect_stdout
from pathlib import Path

from components.core.code_copies import cache_folder
from components.core.errors import CasemateError, first_line
from components.models.networks import robustbench
from components.models.places.registry import Loaded, ModelFacts
from components.models.spec import ModelSpec


def load(name: str, given: ModelFacts, suggested: ModelFacts) -> Loaded:
    """The model of `NAME[@DATASET[/THREAT]]`; normalisation is a part of the network."""
    entry = robustbench.Entry.of(name)
    utils = robustbench.module(entry, "robustbench.utils")
    robustbench.check_listed(entry)
    try:
        with redirect_stdout(sys.stderr):  # of its downloads
            net = utils.load_model(
                model_name=entry.name,
                model_dir=str(weights_folder()),
                dataset=entry.dataset,
                threat_model=entry.threat,
            )
    except Exception as error:
        remedy = f"cannot be loaded by robustbench: {first_line(error)}; its weights belong into "
        raise CasemateError("model", entry, f"{remedy}{weights_folder()}") from error
    side, num_classes = robustbench.SIDES[entry.dataset]
    spec = ModelSpec(
        architecture=str(entry),
        num_classes=num_classes,
        channels=3,
        image_size=side,
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        options={"package": robustbench.package_digest(entry)},
    )
    return Loaded(net.eval(), spec)


def weights_folder() -> Path:
    """Where robustbench keeps downloaded weights."""
    return cache_folder().parent / "robustbench"
