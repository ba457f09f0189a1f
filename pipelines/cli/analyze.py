"""The analyze command: a recipe's models, or any model on any data."""

from typing import Annotated

import typer

from components.core.errors import CasemateError
from components.core.hints import did_you_mean
from pipelines.cli.given_model import Section, model_command

EXAMPLE = (
    "Example: casemate analyze my-recipe.yaml --set analyze.lesions.num_samples=10   Without a "
    "recipe: casemate analyze --model models/deit-s --data imagenet --data-path imagenet "
    "--study correlation,lesions"
)
STUDIES = (
    "correlation", "lesions", "restricted_attention", "gaps", "perturbations", "accumulation",
)  # fmt: skip
FROM_NOISE = "accumulation"  # the study without items


def _section(
    _: list[str],
    study: Annotated[
        str | None, typer.Option(help=f"Of {', '.join(STUDIES)}, with commas.")
    ] = None,
    num_items: Annotated[
        int | None,
        typer.Option(help="Number of test items, at least 1; default: that of each study."),
    ] = None,
) -> Section:
    """The studies, with their number of items if that is given."""
    assert study is not None
    names = [name.strip() for name in study.split(",")]
    for name in names:
        if name not in STUDIES:
            raise CasemateError("--study", repr(name), did_you_mean(name, STUDIES))
    if num_items is not None and set(names) == {FROM_NOISE}:
        raise CasemateError("--num-items", num_items, f"does not apply to {FROM_NOISE}: no items")
    if num_items is None:
        return {name: {} for name in names}
    return {
        name: {} if name == FROM_NOISE else {"subset": {"num_items": num_items}} for name in names
    }


analyze = model_command("analyze", _section, required=["study"])
