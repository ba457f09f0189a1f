"""Charts: well-formed, repeatable, and curves that never claim more than the data."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.report import figures, radius_figures
from components.report.content import Accuracy

HALF = Accuracy(0.5, 0.4, 0.6, 100)
HOSTILE = '<script>alert("x")</script> & $\\frac{1}{0}$ _name'


def bars(models, name="attack.linf"):
    rows = [HALF] * len(models)
    return figures.attack_bars(models, clean=rows, attacked=rows, name=name, alt=HOSTILE)


@given(
    st.lists(st.floats(0, 2).map(lambda r: round(r, 2)), max_size=60),
    st.integers(0, 20), st.integers(2, 80),
)  # fmt: skip
def test_step_knots_equal_or_understate_a_direct_count(radii, others, max_steps):
    num_items = len(radii) + others + 1
    values = np.array(radii)
    knots, shares = radius_figures.certified_steps(values, num_items=num_items, max_steps=max_steps)
    for r in np.linspace(0, 2, 41):
        later = knots >= r
        drawn = shares[later][0] if later.any() else 0.0
        exact = np.count_nonzero(values >= r) / num_items
        assert drawn <= exact
        if len(set(radii)) <= max_steps:
            assert drawn == exact


def test_hostile_names_stay_text():
    svg = bars([HOSTILE, "main"])
    root = ET.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
    assert root.attrib["aria-label"] == HOSTILE
    assert not [node for node in root.iter() if node.tag.endswith("script")]
    assert any((node.text or "").startswith("<script>") for node in root.iter())


def test_equal_data_gives_equal_bytes_and_charts_share_no_id():
    assert bars(["main"]) == bars(["main"])
    ids = [set(re.findall(r'\bid="([^"]+)"', bars(["main"], name=n))) for n in ("one", "two")]
    assert ids[0]
    assert not ids[0] & ids[1]
    used = set(re.findall(r"#([0-9a-z]{8,})\b", bars(["main"], name="one")))
    assert used <= ids[0]


def test_every_drawn_colour_belongs_to_the_page():
    svg = bars(["main", "standard"])
    bare = re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg)
    assert not bare
    assert "var(--attacked, " in svg


def test_training_curves_leave_out_absent_series():
    rows = [{"epoch": e, "loss": 1.0, "val_accuracy": 0.5, "eps": None} for e in range(3)]
    svg = figures.training_curves(rows, name="t", alt="t")
    assert "loss" in svg
    assert "epsilon" not in svg
    with pytest.raises(ValueError, match="no series"):
        figures.training_curves([{"epoch": 0}], name="t", alt="t")


def test_a_certificate_without_any_certified_item_can_be_drawn():
    knots, shares = radius_figures.certified_steps(np.array([]), num_items=5)
    svg = radius_figures.radius_curve(
        knots, share=shares, low=shares, high=shares + 0.5, standard=HALF, cap=0.0, attacked=None,
        name="r", alt="r",
    )  # fmt: skip
    assert svg.startswith("<svg")
