"""Published figures stand beside ours only where both are the same quantity."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from components.report.content import Accuracy, Column, Table
from components.report.published import FORM, beside_published
from pipelines.recipe.load import available, find, header

CLEAN, ATTACKED = Accuracy(0.9, 0.85, 0.94, 200), Accuracy(0.55, 0.48, 0.62, 200)
BOTH = "90.06 % clean, 56.14 % under AutoAttack."
PATCHES = "88.4 % clean; 75.0, 63.8 % certified against 2 x 2 and 4 x 4 patches."


def headline(attack="After AutoAttack"):
    columns = Column("Model"), Column("Clean", "measured"), Column(attack, "attacked", "eps 8/255")
    return Table("headline", columns, (("standard", CLEAN, CLEAN), ("main", CLEAN, ATTACKED)))


def certificate(sizes=(2, 4), *, sound=True, threat="patch"):
    certified = {2: np.arange(8) < 5, 4: np.arange(8) < 3}
    return SimpleNamespace(
        family=SimpleNamespace(threat_name=threat), sound=sound, correct=np.arange(8) < 7,
        document=SimpleNamespace(claim={"patch_sizes": sizes}), certified_at=certified.__getitem__,
    )  # fmt: skip


def test_clean_and_attacked_figures_of_the_main_model():
    assert beside_published(BOTH, headline(), ()).rows == (
        ("clean", 90.06, "90.00% (85.0 to 94.0), n = 200"),
        ("AutoAttack, eps 8/255", 56.14, "55.00% (48.0 to 62.0), n = 200"),
    )


def test_certified_figures_of_the_claimed_sizes():
    table = beside_published(PATCHES, headline(), [certificate((2,)), certificate(threat="l2")])
    clean, two = table.rows  # 4 x 4 is not claimed here
    assert clean[:2] == ("clean, smoothed", 88.4)
    assert clean[2].startswith("87.50%")
    assert two[1] == 75.0
    assert two[2].startswith("62.5% (")  # proven: one decimal, rounded down


@pytest.mark.parametrize(
    ("text", "shown", "certificates"),
    [
        ("none are published.", headline(), ()),
        ("clean, AutoAttack: 68.32, 25.78 % plain", headline(), ()),
        ("published as curves only; up to 5 points below.", headline(), ()),
        (BOTH, Table("headline", (Column("Model"),), (("main",),)), ()),
        (PATCHES, headline(), [certificate(sound=False)]),
        (PATCHES, headline(), [certificate(), certificate()]),  # which one is meant is not known
        (PATCHES, headline(), []),
    ],
)
def test_other_texts_and_results_are_compared_with_nothing(text, shown, certificates):
    assert beside_published(text, shown, certificates) is None


def test_a_list_with_more_attacks_is_another_quantity():
    (row,) = beside_published(BOTH, headline("After AutoAttack, PGD-20"), ()).rows
    assert row[0] == "clean"


def test_figures_of_ready_recipes_are_read_as_they_are_written():
    """Whatever is read agrees with the numbers of the text, in their order."""
    texts = [header(str(find(name))).get("Figures", "") for name in available()]
    read = [(text, found) for text in texts if (found := FORM.match(text))]
    assert len(read) >= 30
    for text, found in read:
        numbers = re.findall(r"\d+\.\d+", found[0])
        parts = [found["clean"], found["attacked"] or found["certified"]]
        assert numbers == ", ".join(filter(None, parts)).split(", ")
        assert text.startswith(found[0])
