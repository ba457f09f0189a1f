"""What the golden tests ask of the project: the only file of this folder that imports it.

Whoever moves modules changes the imports here and leaves the record alone.
"""

from pathlib import Path
from typing import Any

from components.certify.certificate import check_claim, write_certificate
from components.certify.verify import recertify, verify
from components.certify.votes import read_votes, write_votes
from components.core.errors import CasemateError
from pipelines.flow.plan import plan
from pipelines.recipe.costs import Hardware, Question, rows_of
from pipelines.recipe.load import available, load
from pipelines.recipe.schema.recipe import Recipe
from pipelines.stages.certify.cost import costs_of

Refusal = CasemateError  # of what a user can mend


def recipe_names() -> list[str]:
    """The ready recipes."""
    return available()


def load_recipe(name_or_path: str, *, smoke: bool = False) -> Recipe:
    """A validated recipe, shrunk where `smoke` is asked for."""
    return load(name_or_path, smoke=smoke)


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Plain values with every default written out."""
    return recipe.resolved()


def recipe_digest(recipe: Recipe) -> str:
    """Identity of what a recipe computes."""
    return recipe.digest()


def fingerprints(recipe: Recipe, storage: Path) -> dict[str, str]:
    """Every step of a recipe's plan with its fingerprint, in the order of the plan."""
    return {step.name: step.fingerprint for step in plan(recipe, storage)}


def folder_names(recipe: Recipe, storage: Path) -> list[str]:
    """The folders that the steps of a recipe write into, relative to the storage."""
    return [
        step.folder.relative_to(storage).as_posix()
        for step in plan(recipe, storage)
        if not step.given
    ]


def estimates(recipe: Recipe) -> list[dict[str, Any]]:
    """What the certificates of a recipe cost on 100 items, on every known accelerator."""
    hardware = Hardware(accelerators=[], dtype="fp32", num_workers=2)
    return rows_of(costs_of(recipe, Question(num_items=100)), hardware)


def derive(folder: Path, claim: dict[str, Any]) -> dict[str, Any]:
    """Write the certificate of a claim beside the votes in `folder`; its JSON document."""
    votes = read_votes(folder / "votes.parquet")
    return write_certificate(folder, votes, check_claim(votes.header, claim)).to_dict()


def problems_of(folder: Path) -> list[str]:
    """Claims of a stored certificate that do not follow from its votes."""
    return verify(folder).problems


def derive_again(folder: Path, out: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Another certificate from the same votes, written into `out`; its JSON document."""
    return recertify(folder, out, **changes).to_dict()


def rewrite_votes(source: Path, target: Path) -> None:
    """Read a votes file and write its rows and header anew."""
    votes = read_votes(source)
    write_votes(target, votes.rows(), votes.header.to_dict())
