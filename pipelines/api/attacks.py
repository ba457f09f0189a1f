"""Attacks on a loaded model in this process."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from components.core.errors import CasemateError
from components.core.settings import FLOAT32, RUN_SEED
from pipelines.api.models import check_model, check_seed
from pipelines.api.tables import Accuracy, accuracy_of, frame

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from components.attacks.base_settings import AttackSettings
    from components.attacks.cascade import CascadeResult
    from components.attacks.interface import Items
    from components.models.pixels import PixelModel
    from pipelines.recipe.schema.attack import AttackSection

    AttackEntry = str | AttackSettings | Mapping[str, Any]
    Attacks = AttackEntry | Sequence[AttackEntry]


@dataclass(frozen=True, slots=True)
class AttackReport:
    """Result of a list of attacks: `robust_accuracy` counts items that are correct under all of it.

    `x_adv` holds the best points: the one that broke an item, for the others that of the highest
    margin of logits, and the image itself where that is misclassified already. `table` has one row
    per item, `attacks` one per attack; `warnings` list why the figure may be too high.
    """

    norm: str
    eps: float | None
    clean_accuracy: Accuracy
    robust_accuracy: Accuracy
    x_adv: "Tensor"
    table: "pd.DataFrame"
    attacks: "pd.DataFrame"
    warnings: tuple[str, ...]
    precision: str = FLOAT32
    """Precision of the model that was attacked."""

    @property
    def broken_by(self) -> "dict[str, int]":
        """Number of items that each attack broke, in order."""
        return dict(zip(self.attacks["attack"], self.attacks["num_broken"], strict=True))


def attack(
    model: "PixelModel",
    images: "Tensor",
    labels: "Tensor",
    *,
    eps: float | str | None,
    norm: str | None = None,
    attacks: "Attacks" = "autoattack",
    seed: int = RUN_SEED,
    item_ids: Sequence[str] | None = None,
    micro_batch: "int | Literal['auto'] | None" = None,
    precision: str = FLOAT32,
) -> AttackReport:
    """Attack a model; each attack gets the items that are correct under all earlier ones.

    `attacks`: short text (`"pgd-20,apgd-ce"`), settings of `components.attacks.settings`,
    entries as in a recipe, or a list of these. `norm` (None: linf) and `micro_batch`, the rows of
    every forward pass, default to those of recipes. `precision` is as in recipes: accuracies are
    those of the model in it. Random numbers depend on `seed` and the item ids alone. Weak attacks
    also issue a `UserWarning`.

    >>> from pipelines import api
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
    >>> model = api.load_model(network, image_size=8)
    >>> images = torch.rand(4, 3, 8, 8)
    >>> labels = model(images).argmax(dim=1)
    >>> report = api.attack(model, images, labels, eps="8/255", attacks="pgd-20,apgd-ce-20")
    >>> report.clean_accuracy.value
    1.0
    >>> report.robust_accuracy.value <= report.clean_accuracy.value
    True
    >>> bool((report.x_adv - images).abs().max() <= 8 / 255 + 1e-6)
    True
    """
    from components.attacks.evaluation import attack_model, weaknesses
    from components.attacks.interface import Items
    from components.attacks.listing import attack_list, check_class_count
    from components.attacks.passes import AskedPasses, decided_passes
    from components.core.arithmetic import EXACT, using
    from components.data.memory import as_pixels, checked_ids, checked_labels
    from pipelines.runtime import progress

    check_model(model)
    check_seed(seed)
    section = _attack_section(
        attacks, norm=norm, eps=eps, micro_batch=micro_batch, precision=precision
    )
    listed = attack_list(section.attacks, norm=section.norm, eps=section.eps)
    check_class_count([x.settings for x in listed], num_classes=model.spec.num_classes)
    pixels, device = as_pixels(images), model.mean.device
    known = checked_labels(labels, pixels, model.spec.num_classes)
    model.spec.check_image(pixels.shape[1:])
    ids = checked_ids(item_ids, len(pixels))
    items = Items(pixels.to(device), known.to(device), ids, seed)
    total = len(items) * len(listed)
    asked = AskedPasses(
        micro_batch=section.micro_batch, compiled=False, precision=section.precision
    )
    with using(EXACT):
        passes = decided_passes(asked, model, items.x)
    with using(passes.arithmetic), progress.bar("attack", total=total, unit="items") as bar:
        result = attack_model(
            model,
            items,
            listed,
            passes=passes,
            on_progress=lambda rows, _: bar.advance(rows),
        )
    found = tuple(weaknesses(section.attacks, section.eps, result))
    for text in found:
        warnings.warn(text, stacklevel=2)
    state = result.state
    return AttackReport(
        norm=section.norm,
        eps=section.eps,
        clean_accuracy=accuracy_of(state.clean_prediction == state.y),
        robust_accuracy=accuracy_of(state.robust),
        x_adv=result.x_adv,
        table=_attack_table(result, items, norm=section.norm),
        attacks=frame(
            {"attack": tally.name, "num_items": tally.num_rows, "num_broken": tally.num_broken}
            for tally in state.tallies
        ),
        warnings=found,
        precision=passes.precision,
    )


def _attack_section(
    attacks: "Attacks", *, eps: float | str | None, **given: object
) -> "AttackSection":
    """The threat and the attack list, validated as in a recipe."""
    from pydantic import ValidationError

    from components.attacks.base_settings import AttackSettings
    from components.attacks.short_form import read_attack_list
    from components.core.problems import RecipeError
    from components.core.settings import plain
    from components.core.user_code import reading
    from pipelines.recipe.explain import explain
    from pipelines.recipe.schema.attack import AttackSection

    single = isinstance(attacks, str | AttackSettings | Mapping)
    listed: Any = [attacks] if single else attacks
    if not isinstance(listed, Sequence):
        remedy = 'is not a list of attacks; write e.g. "pgd-20,apgd-ce"'
        raise CasemateError("attacks", repr(attacks), remedy)
    entries: list[Any] = []
    for entry in listed:
        short = isinstance(entry, str)
        entries += read_attack_list(entry, key="attacks") if short else [entry]
    values: dict[str, Any] = {
        "eps": eps,
        "attacks": [plain(e) if isinstance(e, AttackSettings) else e for e in entries],
        "sanity": None,  # only in recipes
    }
    values |= {name: value for name, value in given.items() if value is not None}
    with reading(base=Path(), trusted=True):
        try:
            return AttackSection.model_validate(values)
        except ValidationError as error:
            raise RecipeError("attack", explain(AttackSection, values, error)) from None


def _attack_table(result: "CascadeResult", items: "Items", *, norm: str) -> "pd.DataFrame":
    import pandas as pd

    from pipelines.stages.attack.worker import distance

    state = result.state
    columns = ("y", "clean_prediction", "adversarial_prediction", "robust")
    counts = ("num_evaluations", "num_gradients", "num_zero_gradients")
    values = {name: getattr(state, name).cpu().numpy() for name in (*columns, *counts)}
    return pd.DataFrame(
        {
            "item_id": list(items.item_ids),
            "label": values.pop("y"),
            **values,
            "broken_by": state.breaker_names(),
            "distance": distance(result.x_adv, items.x, norm=norm),
        }
    )
