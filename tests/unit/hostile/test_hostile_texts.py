"""Recipes, certificates and names of an attacker: in YAML, JSON, the terminal, the page and CSV."""

import csv
import html
import io
import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.certify.verify import verify
from components.core.control_characters import one_line, visible
from components.core.errors import CasemateError
from components.report.content import Check, Column, Content, Fact, Table
from components.report.page import render
from components.report.tables import to_csv
from pipelines.cli.streams import RedactedStream
from pipelines.recipe.load import loads
from tests.e2e.cli import ROOT, call, mistake_of
from tests.unit.hostile.attacks import CLEAR, DEEP, MARK, QUITE_DEEP, REVERSED, refusal

BASE = "name: x\ndata: {source: digits}\n"
CERTIFICATE = ROOT / "tests" / "golden" / "record" / "certificates" / "columns-b2-s1"


@pytest.fixture
def certificate(tmp_path):
    return shutil.copytree(CERTIFICATE, tmp_path / "certificate")


# -- YAML


@pytest.mark.parametrize(
    "value",
    [
        f"!!python/object/apply:os.system ['touch {MARK}']", "!!python/name:os.system",
        "!!python/object:subprocess.Popen {}", "!!python/module:os", "!evil x",
        "0x" + "f" * 200_000, "9" * 5000, "0b" + "1" * 100_000, "1e9999999", ".inf", ".nan",
        "-0x" + "f" * 200_000, ":".join(["59"] * 5000), "!!int '" + "1_" * 4000 + "'",
        "!!binary " + "A" * 8, "2026-02-31", "!!timestamp '9999-99-99'", "!!set {a, b}",
        "&a [*a]", "{? [a, b] : c}", "!!float '" + "9" * 5000 + "'", "!!bool x",
        "!!timestamp x", "!!int x",
    ],
    ids=lambda value: value[:30],
)  # fmt: skip
@pytest.mark.timeout(60)
def test_yaml_values(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    refusal(lambda: loads(f"{BASE}seed: {value}\n", source="x.yaml"), "x.yaml")
    refusal(lambda: loads(f"{BASE}{value}: 1\n", source="x.yaml"), "x.yaml")
    refusal(lambda: loads(BASE, source="x.yaml", overrides=[f"seed={value}"]), "seed")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "/x", "..", "<b>", "=cmd", CLEAR, REVERSED, "x\n", "a b", "-x", ""]
)
@pytest.mark.parametrize(
    "text",
    [
        "name: NAME\ndata: {source: digits}", BASE + "train: {variants: {NAME: {}}}",
        BASE + "attack: {NAME: {eps: 0.1, attacks: [{kind: pgd}]}}",
        BASE + "certify: {NAME: {kind: columns}}",
    ],
)  # fmt: skip
def test_names_of_a_recipe_are_plain(name, text):
    """They become folders, metrics and runs of MLflow."""
    hostile = text.replace("NAME", json.dumps(name))
    refusal(lambda: loads(hostile, source="x.yaml"), "x.yaml", num_problems=5)


# -- certificates


@pytest.mark.parametrize("name", ["certificate.json", "votes header"])
@pytest.mark.parametrize("content", [DEEP, QUITE_DEEP, b"\xff", b"[]", b"1" * 5000, b"null"])
def test_documents_of_a_certificate(certificate, name, content):
    if name == "certificate.json":
        (certificate / name).write_bytes(content)
    else:
        path = certificate / "votes.parquet"
        table = pq.read_table(path)
        pq.write_table(table.replace_schema_metadata({b"casemate": content}), path)
    refusal(lambda: verify(certificate))


@pytest.mark.parametrize(
    "change",
    [
        {"claim": {"patch_sizes": [10**30]}}, {"claim": {"patch_sizes": "x"}}, {"claim": {}},
        {"claim": {"patch_sizes": list(range(10**5)), "rule": "count"}}, {"claim": {"rule": []}},
        {"kind": []}, {"kind": "__class__"}, {"evidence": {"settings": {"band": 10**30}}},
    ],
    ids=lambda change: str(change)[:40],
)  # fmt: skip
def test_claims_that_cannot_be(certificate, change):
    path = certificate / "certificate.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    said = call("verify", certificate)
    assert said.code in (1, 2)  # problems, or a refusal
    assert "failed: " not in said.err
    assert len(said.err.splitlines()) <= 1


def test_a_table_of_claims_without_end(certificate):
    path = certificate / "certificates.parquet"
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table] * 2000).combine_chunks(), path)
    refusal(lambda: verify(certificate), "certificates.parquet has ", " rows, not ")


def test_item_ids_of_an_attacker_on_the_terminal(certificate):
    path = certificate / "certificates.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[0]["item_id"] = f"{CLEAR}{REVERSED}\r=cmd"
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    said = call("verify", certificate)
    assert said.code == 1
    assert "\\x1b[2J\\x1b]0;owned\\x07\\u202egpj.exe\\x0d=cmd" in said.out
    assert "\x1b" not in said.out + said.err


# -- output


def test_control_characters_become_visible():
    assert visible(f"a{CLEAR}b\tc\nd") == "a\\x1b[2J\\x1b]0;owned\\x07b\tc\nd"
    assert visible("\x1b[1;31mred\x1b[0m") == "red"
    assert visible("e\u0301 日本語 عربى ✓ \U0001f600") == "e\u0301 日本語 عربى ✓ \U0001f600"
    assert visible(f"{REVERSED}\u2066\u200f\ud800") == "\\u202egpj.exe\\u2066\\u200f\\ud800"
    assert one_line("a\n  b\r\nc\u2028d") == "a b c d"


def test_an_error_is_one_printable_line():
    error = CasemateError(f"key{CLEAR}", f"a\n{REVERSED}", "is bad\x9b31m;\n\tmend it")
    assert str(error) == ("key\\x1b[2J\\x1b]0;owned\\x07: a \\u202egpj.exe is bad\\x9b31m; mend it")
    assert "\x1b" not in mistake_of("lint", f"{CLEAR}.yaml")


def test_only_bars_may_move_the_cursor():
    from rich.console import Console

    buffer = io.StringIO()
    stream = RedactedStream(buffer)
    stream.write("a\x1b[2Kb")
    Console(file=stream, force_terminal=True, color_system=None).control(_up())
    assert buffer.getvalue() == "a\\x1b[2Kb\x1b[1A"


def _up():
    from rich.control import Control

    return Control.move(y=-1)


EVIL = [
    "<img src=x onerror=alert(1)>", "=cmd|' /C calc'!A0", "+1+cmd", "-2+3", "@SUM(A1)", "\t=1",
    CLEAR, REVERSED, "javascript:alert(1)", "{{ 7 * 7 }}", "</script><script>alert(1)</script>",
]  # fmt: skip


def test_names_on_the_page_stay_text():
    columns = (Column("model", "text"), *(Column(text, "measured") for text in EVIL))
    table = Table("t", columns, tuple((text, *[None] * len(EVIL)) for text in EVIL))
    facts, text = tuple(Fact(text, text) for text in EVIL), "\n".join(EVIL)
    page = render(Content(text, text, facts, table, (Check(False, text),), (), text, facts))
    assert visible(page) == page
    assert page.count("<script") == 1  # our own; the page's policy names its digest
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "49" not in page.partition("</style>")[2].partition("base64")[0]
    assert html.escape(EVIL[0]) in page


def test_cells_that_a_spreadsheet_would_compute():
    rows = tuple((text, -0.5) for text in [*EVIL, "-0.5", "plain", "-", "1e5"])
    text = to_csv(Table("t", (Column("=name"), Column("x", "number")), rows))
    header, *read = csv.reader(io.StringIO(text, newline=""))
    assert header[0] == "'=name"
    for cell, number in read:
        assert number == "-0.5"
        assert cell[0] not in "=+@\t"
        assert cell[0] != "-" or cell in ("-", "-0.5")
        assert visible(cell) == cell
    assert [cell for cell, _ in read][-4:] == ["-0.5", "plain", "-", "1e5"]
