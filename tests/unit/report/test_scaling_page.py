"""`api.scaling`: several runs become one page; slopes are those of numpy, mistakes one line."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from components.core.errors import CasemateError
from components.evaluate.across_runs import Benchmark, benchmarks_of, merged
from components.evaluate.metrics import Subject, rows_of, share, write_metrics
from pipelines import api
from pipelines.cli.main import app
from pipelines.runtime.inventory import inventory
from pipelines.runtime.storage import Storage
from tests.stored_steps import finish, force, place_of
from tests.unit.report.evaluated import made_rows

SIZES = {"vit": (6, 22, 86, 307), "resnet": (12, 25, 45)}
NUM_ITEMS = 1000


def correct(family, size, suite):
    """Accuracy that grows with size, in whole items."""
    slope = {"vit": -0.3, "resnet": -0.1}[family] * (1 if suite == "clean" else 0.5)
    error = round(NUM_ITEMS * 0.6 * size**slope)
    return np.arange(NUM_ITEMS) >= error


@pytest.fixture
def runs(tmp_path):
    """Seven runs with one model each, all called main."""
    for family, sizes in SIZES.items():
        for size in sizes:
            subject = Subject(
                model="main", model_digest=f"{family}{size}", family=family, params_m=float(size),
                pretrain="in21k", recipe=f"{family}-{size}", dataset="made", dataset_digest="d",
                seed=0, resize="squash",
            )  # fmt: skip
            for suite, item, metric in (("clean", "all", "accuracy"), ("shifts", "r", "masked")):
                folder = tmp_path / "runs" / f"{family}-{size}" / f"evaluate.{suite}-0"
                folder.mkdir(parents=True)
                found = [share(correct(family, size, suite), item=item, metric=metric)]
                write_metrics(folder / "metrics.parquet", rows_of(subject, suite, found))
    return tmp_path / "runs"


def test_slopes_are_those_of_polyfit(runs):
    found = api.scaling([runs])
    assert [b.title for b in found.panels] == ["clean", "shifts r masked"]
    for benchmark, fits in found.panels.items():
        for fit in fits:
            sizes = SIZES[fit.family]
            errors = [1 - correct(fit.family, size, benchmark.suite).mean() for size in sizes]
            slope, intercept = np.polyfit(np.log10(sizes), np.log10(errors), 1)
            assert fit.slope == pytest.approx(slope)
            assert fit.intercept == pytest.approx(intercept)
            assert [point.n for point in fit.points] == [NUM_ITEMS] * len(sizes)
            assert all(p.interval[0] < p.error < p.interval[1] for p in fit.points)
    table = found.table
    assert list(table["num_models"]) == [3, 4, 3, 4]
    assert {point.model for fits in found.panels.values() for fit in fits for point in fit.points} \
        == {f"{f}-{s}" for f, sizes in SIZES.items() for s in sizes}  # fmt: skip


def test_page_and_chart_are_files_of_equal_bytes(runs, tmp_path):
    page = api.scaling([runs], out=tmp_path / "a.html").page.read_text()
    again = api.scaling([*sorted(runs.iterdir(), reverse=True), runs], out=tmp_path / "b.html")
    assert again.page.read_text() == page
    assert str(tmp_path) not in page
    for row in again.records():
        assert f"{row['slope']:.3f}" in page
    api.scaling([runs], suites=["clean"], out=tmp_path / "c.svg")
    drawn = ET.fromstring((tmp_path / "c.svg").read_text())
    assert drawn.tag.endswith("svg")
    assert "shifts" not in drawn.attrib["aria-label"]
    assert not re.search(r"https?://(?!www\.w3\.org)", page)


def test_seeds_are_models_of_their_own_and_contradictions_are_refused(runs):
    path = runs / "vit-86" / "evaluate.clean-0" / "metrics.parquet"
    from components.evaluate.metrics import read_metrics

    rows = read_metrics(path)
    both = merged({"a": rows, "b": [replace(rows[0], seed=1, value=0.5)], "c": rows})
    assert [row.model for row in both] == ["vit-86 seed 0", "vit-86 seed 1"]
    with pytest.raises(CasemateError, match=r"vit-86 has two results of clean all accuracy: of a"):
        merged({"a": rows, "b": [replace(rows[0], value=0.5)]})


def test_white_box_attacks_of_all_models_are_one_benchmark():
    rows = merged({"one": made_rows()})
    found = benchmarks_of(rows, suites=["transfer", "corruptions"])
    assert found == [
        *(Benchmark("corruptions", "all", name) for name in ("mean75", "mean95")),
        *(Benchmark("transfer", f"{a} white-box", "accuracy", 1 / 255) for a in ("fgsm", "pgd")),
    ]


def invoke(*arguments):
    return CliRunner().invoke(app, ["scaling", *map(str, arguments)])


def test_command_prints_fits_and_writes_the_page(runs, tmp_path):
    out = tmp_path / "page.html"
    shown = invoke(runs, "--out", out)
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert lines[0].startswith("clean accuracy: resnet, in21k: slope -0.1")
    assert lines[-1] == f"page: {out}"
    found = json.loads(invoke(runs, "--suite", "clean", "--out", out, "--json").output)
    assert [fit["family"] for fit in found["fits"]] == ["resnet", "vit"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "needs files or folders"),
        (["nowhere"], "scaling: nowhere does not exist"),
        (["RUNS", "--suite", "clear"], "suite: clear is unknown; choose from clean,"),
        (["RUNS", "--suite", "spatial"], "has no accuracy of spatial"),
        (["RUNS", "--out", "page.pdf"], "page.pdf ends in neither .html nor .svg"),
        (["RUNS", "--out", "no/where.html"], "no is not a folder"),
    ],
)
def test_mistakes_are_one_line(runs, arguments, said):
    shown = invoke(*(runs if a == "RUNS" else a for a in arguments))
    assert shown.exit_code != 0
    assert isinstance(shown.exception, CasemateError)
    assert said in str(shown.exception)
    assert "\n" not in str(shown.exception)


def test_mixed_data_and_folders_without_results_are_refused(runs, tmp_path):
    with pytest.raises(CasemateError, match=r"has no metrics.parquet; casemate evaluate writes it"):
        api.scaling([tmp_path / "runs" / "vit-6" / "evaluate.clean-0", _empty(tmp_path)])
    path = runs / "vit-6" / "evaluate.clean-0" / "metrics.parquet"
    from components.evaluate.metrics import read_metrics

    write_metrics(path, [replace(row, resize="timm") for row in read_metrics(path)])
    with pytest.raises(CasemateError, match="differ in resize"):
        api.scaling([runs])


def _empty(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def test_stored_steps_count_once_as_they_are_now(runs, s3_root, tmp_path):
    """Of a storage or step by URI, and of a folder whose steps were made again."""
    local, bucket = Storage.at(tmp_path / "storage"), Storage.at(s3_root)
    for path in sorted(runs.glob("*/evaluate.clean-0/metrics.parquet")):
        recipe = path.parts[-3]
        again = place_of(local, recipe, "evaluate.clean")
        finish(again, {"metrics.parquet": b"of a mistake"})
        force(again)
        for place in (again, place_of(bucket, recipe, "evaluate.clean")):
            finish(place, {"metrics.parquet": path.read_bytes()})
    expected = api.scaling([runs], suites=["clean"])
    for given in ([local.root], [s3_root], [str(place) for place in _places(bucket)]):
        found = api.scaling(given, out=tmp_path / "page.html")
        assert found.records() == expected.records()
        names = re.findall(r"evaluate\.clean-0123456789ab/metrics\.parquet", found.page.read_text())
        assert len(names) == sum(map(len, SIZES.values()))
    with pytest.raises(CasemateError, match=r"nothing has no metrics\.parquet"):
        api.scaling([f"{s3_root}/nothing"])


def _places(storage):
    return [step.place for step in inventory(storage).steps.values()]
