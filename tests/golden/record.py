"""The golden record: what it holds, and how it is renewed.

Renew it only when a change of numbers, fingerprints or formats is intended, and say so in the
commit:

    python -m tests.golden.record                     fingerprints, and claims from the kept votes
    python -m tests.golden.record --flow STORAGE      also votes and key sets of a finished flow
"""

import argparse
import shutil
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from tests.golden import adapter, standins
from tests.golden.documents import (
    VERSION_KEYS,
    digest,
    read_json,
    table_digest,
    without,
    write_json,
)
from tests.golden.layout import (
    CERTIFICATES,
    CLAIMS,
    ESTIMATES,
    FLOWS,
    HERE,
    KEPT,
    KEYS,
    RECIPES,
    keys_record,
)

PLACE = ("cluster", "storage", "tracking")

# Certificates whose votes are kept; the others of the flow differ in settings only.
KEPT_OF_FLOW = (
    *("columns-b2-s1", "columns-b2-s2", "columns-b3-s1", "challenged", "paper", "early", "masked"),
    *("rows", "blocks", "both", "masks", "early-blocks"),
    *("l2", "randomized", "sequential", "one-shot", "ancestral", "heun", "sequential-denoised"),
)

ESTIMATED = (
    *("golden/flow", "demo", "certify-100k", "svit-cifar-col4-vit-t"),
    *("svit-in1k-col19-vit-s", "svit-in1k-col19-r50", "svit-in1k-block75-vit-t"),
)

# Other claims from the same votes, by names of their own.
RECERTIFIED: dict[str, tuple[str, dict[str, Any]]] = {
    "columns, rule loc": ("columns-b2-s1", {"rule": "loc", "second_rule": "none"}),
    "columns, larger patches": ("columns-b3-s1", {"patch_sizes": [1, 2, 3, 4]}),
    "columns, paper_reference": ("columns-b2-s2", {"delta_rule": "paper_reference"}),
    "thinned, strict": ("columns-b2-s2", {"rule": "strict", "patch_sizes": [1]}),
    "paper, exact": ("paper", {"delta_rule": "exact"}),
    "early, one size": ("early", {"patch_sizes": [1], "rule": "loc", "second_rule": "none"}),
    "rows, count": ("rows", {"rule": "count", "second_rule": "loc"}),
    "blocks, strict": ("blocks", {"rule": "strict", "second_rule": "none"}),
    "both, larger patches": ("both", {"patch_sizes": [1, 2, 3]}),
    "both, paper_reference": ("both", {"delta_rule": "paper_reference"}),
    "blocks, paper_reference": ("blocks", {"delta_rule": "paper_reference"}),
    "sequential, one radius": ("sequential", {"radii": [0.1]}),
    "l2, other alpha": ("l2", {"failure_prob": 0.05, "radii": [0.1, 0.2]}),
    "randomized, other alpha": ("randomized", {"failure_prob": 0.002}),
    "randomized, other radii": ("randomized", {"radii": [0.01, 0.3]}),
    "one-shot, other alpha": ("one-shot", {"failure_prob": 0.001, "radii": [0.1]}),
    "heun, other radii": ("heun", {"radii": [0.02]}),
}


def recipe_files() -> dict[str, str]:
    """What `load_recipe` takes, by the names under which recipes are recorded."""
    ready = {name: name for name in adapter.recipe_names()}
    return ready | {f"golden/{name}": str(HERE / f"{name}.yaml") for name in FLOWS}


def recipes_record(root: Path) -> dict[str, Any]:
    """Digests and fingerprints of all recipes; `root` is an empty folder to work in."""
    bare, filled = root / "bare", root / "filled"
    bare.mkdir()
    filled.mkdir()
    record = {}
    for name, file in recipe_files().items():
        full = adapter.load_recipe(file)
        places = standins.places_of(adapter.resolved(full))
        for place in places:
            standins.make(place, filled)
        trains = adapter.resolved(full)["train"] is not None
        with chdir(filled):
            own = _described(full, stand_ins=places)
        with chdir(bare if trains else filled):  # without training, the model that it names stays
            small = adapter.load_recipe(file, smoke=True)
            left = standins.places_of(adapter.resolved(small))
            own["smoke"] = _described(small, stand_ins=left)
        record[name] = own
    return record


def _described(recipe: Any, *, stand_ins: list[str]) -> dict[str, Any]:
    """Digests, fingerprints, and which form of the recipe they are of."""
    return {
        "form": {"images": adapter.resolved(recipe)["data"]["source"], "stand-ins": stand_ins},
        "resolved": digest(_without_place(adapter.resolved(recipe))),
        "digest": adapter.recipe_digest(recipe),
        "steps": adapter.fingerprints(recipe, Path("storage")),
    }


def _without_place(values: dict[str, Any]) -> dict[str, Any]:
    """What a recipe computes, not where; `tests/recipes/snapshots` have all defaults."""
    return {key: value for key, value in values.items() if key not in PLACE}


def estimates_record() -> dict[str, Any]:
    """What some recipes cost: patch and l2 certificates, ViTs and ResNets, denoisers."""
    files, words = recipe_files(), frozenset({"rate"})
    return {
        name: without(adapter.estimates(adapter.load_recipe(files[name])), words)
        for name in ESTIMATED
    }


def claims_record(root: Path) -> dict[str, Any]:
    """Certificates derived from the kept votes, and others from the same votes."""
    derived, again = {}, {}
    for folder in sorted(CERTIFICATES.iterdir()):
        own = root / folder.name
        own.mkdir()
        shutil.copy(folder / "votes.parquet", own)
        document = adapter.derive(own, read_json(folder / "certificate.json")["claim"])
        derived[folder.name] = _claimed(own, document)
    for name, (source, changes) in RECERTIFIED.items():
        out = root / name
        again[name] = _claimed(out, adapter.derive_again(CERTIFICATES / source, out, changes))
    return {"pyarrow": pa.__version__, "derived": derived, "recertified": again}


def _claimed(folder: Path, document: dict[str, Any]) -> dict[str, Any]:
    """What a certificate holds; the bytes of its table only count for one version of pyarrow."""
    assert read_json(folder / "certificate.json") == document
    plain = without(document, VERSION_KEYS | {"certificates_sha256"})
    return {
        "votes": document["votes_sha256"],
        "table": table_digest(folder / "certificates.parquet"),
        "bytes": document["certificates_sha256"],
        "document": digest(plain),
        "claim": document["claim"],
        "summary": document["summary"],
    }


def keep_certificates(storage: Path) -> None:
    """Copy the certificates of a finished flow into the record."""
    shutil.rmtree(CERTIFICATES, ignore_errors=True)
    for name in KEPT_OF_FLOW:
        (folder,) = (p.parent for p in storage.glob(f"golden/certify.{name}-*/manifest.json")
                     if p.parent.name.rpartition("-")[0] == f"certify.{name}")  # fmt: skip
        target = CERTIFICATES / name
        target.mkdir(parents=True)
        for file in KEPT:
            shutil.copy(folder / file, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flow", type=Path, help="storage of the finished recipes of this folder")
    storage = parser.parse_args().flow
    if storage:
        keep_certificates(storage)
        write_json(KEYS, keys_record(storage))
    with TemporaryDirectory() as folder:
        write_json(RECIPES, recipes_record(Path(folder)))
    write_json(ESTIMATES, estimates_record())
    with TemporaryDirectory() as folder:
        write_json(CLAIMS, claims_record(Path(folder)))
        for name in () if storage else [p.name for p in CERTIFICATES.iterdir()]:
            for file in KEPT[1:]:
                shutil.copy(Path(folder) / name / file, CERTIFICATES / name)


if __name__ == "__main__":
    main()
