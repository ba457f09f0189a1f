"""The attack command: a recipe's models, or any model on any data."""

from typing import Annotated

import typer

from pipelines.cli.given_model import Section, model_command
from pipelines.cli.options import NumItemsOpt

EXAMPLE = (
    "Example: casemate attack demo   Without a recipe: casemate attack --model models/deit-s "
    "--data imagenet --data-path imagenet --eps 4/255 --attacks pgd-20,apgd-ce"
)


def _section(
    _: list[str],
    eps: Annotated[str | None, typer.Option(help="Budget, e.g. 8/255.")] = None,
    norm: Annotated[str | None, typer.Option(help="linf or l2; default: linf.")] = None,
    attacks: Annotated[
        str | None,
        typer.Option(help="E.g. fgsm,pgd-20,apgd-ce,square-1000; default: autoattack."),
    ] = None,
    num_items: NumItemsOpt = None,
) -> Section:
    """One entry, under the name of its norm."""
    from components.attacks.short_form import read_attack_list

    norm = norm or "linf"
    listed = read_attack_list("autoattack" if attacks is None else attacks, key="--attacks")
    return {norm: {"norm": norm, "eps": eps, "attacks": listed, "num_items": num_items}}


attack = model_command("attack", _section, required=["eps"])
