"""Attack lists as short text: `fgsm,pgd-20,square-1000,autoattack-plus`."""

from components.attacks.base_settings import AttackSettings
from components.attacks.settings import ATTACKS
from components.core.errors import CasemateError


def read_attack_list(text: str, *, key: str) -> list[dict[str, object]]:
    """The entries of a recipe's attack list that `text` stands for; errors name `key`."""
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        remedy = "has an empty entry; write names with one comma between, e.g. pgd-20,apgd-ce"
        raise CasemateError(key, repr(text), remedy)
    return [_entry(part, key=key) for part in parts]


def _entry(text: str, *, key: str) -> dict[str, object]:
    """A kind alone, or followed by a value that its settings accept: a count, a version."""
    kinds: dict[str, type[AttackSettings]] = {kind: ATTACKS[kind].settings for kind in ATTACKS}
    short = {kind: own for kind, own in kinds.items() if own.has_short_form()}
    if text in short:
        return {"kind": text}
    kind, _, detail = text.rpartition("-")
    if kind in short and (given := short[kind].from_suffix(detail)) is not None:
        return {"kind": kind, **given}
    known = ", ".join(sorted(short))
    raise CasemateError(key, text, f"is not an attack; write e.g. pgd-20. Known: {known}")
