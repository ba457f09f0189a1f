"""A result in the fields of RobustBench's model_info files (Croce et al. 2021, arXiv:2010.09670).

Names and forms are theirs: percentages as text with two decimals, `eps` as a fraction. What a
result does not tell is an empty text or null, never a guess: `autoattack_acc` is of the published
AutoAttack only, `additional_data` is not recorded.
"""

from typing import Any

from components.attacks.settings import AutoAttackSettings
from components.core.shares import measured_percent
from components.evaluate.verdicts import Verdicts
from pipelines.api.board_results import BoardResult, is_clean

NORMS = ("robust.linf", "robust.l2")  # those of RobustBench's leaderboards
CORRUPTIONS = "corruptions.mean75"  # 15 corruptions, 5 severities


def fields_of(own: BoardResult, name: str) -> dict[str, Any]:
    """RobustBench's fields of one result."""
    shown, clean = own.verdicts, own.verdicts if is_clean(own.verdicts) else own.clean
    share = percent(shown)
    is_suspect = own.verdict == "suspect"
    return {
        "link": "",
        "name": name,
        "authors": "",
        "additional_data": None,
        "number_forward_passes": None if _votes(own) else 1,
        "dataset": own.dataset_name,
        "venue": "",
        "architecture": own.architecture,
        "eps": shown.budget if _has_radius(shown) else "",
        "clean_acc": percent(clean) if clean is not None else "",
        "reported": share,
        "autoattack_acc": share if _is_autoattack(own) else "",
        "footnote": shown.doubt,
        "unreliable": is_suspect,
        **({"corruptions_acc": share} if shown.base == CORRUPTIONS else {}),
        **({"certified_acc": share} if shown.kind == "proven" else {}),
        **({"patch_size": shown.budget} if ".patch" in shown.base and shown.budget else {}),
    }


def percent(own: Verdicts) -> str:
    """A share in percent with two decimals; a proven one is rounded down."""
    if own.kind != "proven":
        return measured_percent(float(own.share))
    whole = int(10_000 * own.share)
    return f"{whole // 100}.{whole % 100:02}"


def _votes(own: BoardResult) -> bool:
    """Whether a prediction takes the votes of many forward passes."""
    return own.result.stage == "certify"


def _has_radius(own: Verdicts) -> bool:
    return bool(own.budget) and own.kind != "measured" and ".patch" not in own.base


def _is_autoattack(own: BoardResult) -> bool:
    """Whether the attacks are the standard ensemble as published, and nothing else."""
    if own.verdicts.base not in NORMS or own.verdicts.conditions.get("surrogate"):
        return False
    attacks = own.verdicts.conditions["attacks"]
    if len(attacks) != 1 or attacks[0]["kind"] != "autoattack":
        return False
    asked = {name: value for name, value in attacks[0].items() if value is not None}
    return AutoAttackSettings(**asked).members() == AutoAttackSettings().members()
