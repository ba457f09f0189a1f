"""Tables in the column layout of Cohen et al.: what goes out, what comes in, what is caught."""

from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.certify.l2.cohen_tsv import (
    CohenRow,
    audit,
    read_cohen_tsv,
    rows_of_certificates,
    write_cohen_tsv,
)
from components.core.errors import CasemateError

HEADER = "idx\tlabel\tpredict\tradius\tcorrect\ttime\n"


def table(tmp_path, *lines):
    path = tmp_path / "sigma_0.50"
    path.write_text(HEADER + "".join(line.replace(" ", "\t") + "\n" for line in lines))
    return path


def test_export_has_the_published_columns_and_cuts_radii_off(tmp_path):
    path = tmp_path / "ours.tsv"
    rows = [
        CohenRow(0, 3, 3, 0.4999999, 0.4999999, seconds=1.25),
        CohenRow(1, 2, -1, 0.0, 0.0),
        CohenRow(2, 5, 4, 1.25, 1.25),
    ]
    write_cohen_tsv(path, rows)
    assert path.read_text() == (
        HEADER + "0\t3\t3\t0.499999\t1\t1.250\n1\t2\t-1\t0.000000\t0\t\n2\t5\t4\t1.250000\t0\t\n"
    )


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-5, 4))
def test_no_claim_grows_on_its_way_through_a_table(tmp_path_factory, radius):
    path = tmp_path_factory.mktemp("tsv") / "t.tsv"
    write_cohen_tsv(path, [CohenRow(0, 1, 1, radius, radius)])
    printed = path.read_text().split("\t")[-3]
    assert Decimal(printed) <= Decimal(radius) < Decimal(printed) + Decimal("1e-6")
    (back,) = read_cohen_tsv(path)
    assert radius - 2e-6 < back.radius <= radius
    published = f"{radius:.3}"  # as the published scripts print
    path.write_text(HEADER + f"0\t1\t1\t{published}\t1\t16.6\n")
    (foreign,) = read_cohen_tsv(path)
    assert foreign.radius <= radius * (1 + 1e-15)  # 1e-15: a tie of the printing
    assert foreign.radius >= radius * 0.989
    assert foreign.printed == float(published)


def test_a_rounded_radius_does_not_reach_what_it_prints(tmp_path):
    (row,) = read_cohen_tsv(table(tmp_path, "0 3 3 0.5 1 16.6"))  # 0.49975 prints like this
    assert row.printed == 0.5
    assert row.radius == pytest.approx(0.4995)


def test_import_counts_by_label_and_prediction(tmp_path):
    path = table(tmp_path, "0 3 3 0.486 1 0:01:17.5", "20 7 6 0.413 1 17.2", "40 4 -1 0.0 1 ")
    rows = read_cohen_tsv(path)
    assert [row.correct for row in rows] == [True, False, False]
    assert [row.seconds for row in rows] == [77.5, 17.2, None]
    assert [row.index for row in rows] == [0, 20, 40]
    path.write_text(path.read_text() + "\n")  # a blank last line says nothing
    assert read_cohen_tsv(path) == rows


def test_audit_catches_radii_that_the_settings_cannot_give(tmp_path):
    rows = read_cohen_tsv(table(tmp_path, "0 7 7 1.96 1 17.6", "20 8 8 1.91 1 17.6"))
    problems = list(audit(rows, sigma=0.5, n=100_000, alpha=0.001))
    assert len(problems) == 1  # 1.91 may have been 1.905, below the limit 1.9057
    assert "idx 0" in problems[0]
    assert list(audit(rows, sigma=0.5, n=150_000, alpha=0.001)) == []


@pytest.mark.parametrize(
    ("stated", "problem"), [("1 0 1", None), ("1 1 2", "running total"), ("1 1 1", "follow")]
)
def test_audit_knows_a_running_total(tmp_path, stated, problem):
    first, second, third = stated.split()
    rows = read_cohen_tsv(
        table(tmp_path, f"0 3 3 0.4 {first} 1", f"1 3 2 0.4 {second} 1", f"2 3 3 0.4 {third} 1")
    )
    problems = list(audit(rows, sigma=0.5, n=1000, alpha=0.001))
    assert [problem in text for text in problems] == [True] if problem else problems == []


def test_audit_catches_an_abstention_with_a_radius(tmp_path):
    rows = read_cohen_tsv(table(tmp_path, "0 3 -1 0.4 0 1"))
    (found,) = audit(rows, sigma=0.5, n=1000, alpha=0.001)
    assert "abstains" in found


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["0 3 3 0.4 1"], "line 2"),
        (["0 3 3 0.4 1 1", "1 3 3 much 1 1"], "line 3"),
        (["0 3 3 nan 1 1"], "line 2"),
        (["0 3 3 -0.4 1 1"], "line 2"),
        (["0 3 -2 0.4 1 1"], "line 2"),
        (["0 3 3 0.4 1 1", "0 3 3 0.4 1 1"], "repeats"),
        ([], "no rows"),
    ],
)
def test_damaged_tables_are_refused_by_line(tmp_path, lines, reason):
    with pytest.raises(CasemateError, match=reason):
        read_cohen_tsv(table(tmp_path, *lines))


def test_other_files_are_refused(tmp_path):
    for text in ("", "a\tb\n", "idx label predict radius correct time\n"):
        (tmp_path / "x").write_text(text)
        with pytest.raises(CasemateError, match="columns"):
            read_cohen_tsv(tmp_path / "x")
    with pytest.raises(CasemateError, match="cannot be read"):
        read_cohen_tsv(tmp_path / "absent")


def test_rows_of_a_certificate():
    found = rows_of_certificates(
        pa.table({"label": [1, 2], "prediction": [1, -1], "radius": [0.3, 0.0]})
    )
    assert [(r.index, r.correct, r.radius) for r in found] == [(0, True, 0.3), (1, False, 0.0)]
    with pytest.raises(CasemateError, match="not an l2 certificate"):
        rows_of_certificates(pa.table({"label": [1], "prediction": [1]}))
