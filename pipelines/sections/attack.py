"""Attacks on finished models."""

from typing import Annotated, Literal

from pydantic import Field

from pipelines.sections.base import Count, PositivePixels, Section


class PgdAttack(Section):
    """l-inf PGD with a random start (Madry et al. 2018)."""

    kind: Literal["pgd"]
    models: list[str] = Field(default=["main"], min_length=1)
    eps: PositivePixels
    num_steps: Count = 20
    step_size: PositivePixels | None = None  # None: eps / 4
    num_items: Count | None = None  # None: the whole test split
    micro_batch: Count = 25  # rows of every forward pass: logits depend on the batch shape


Attack = Annotated[PgdAttack, Field()]
