"""Precision, measured rows and compiled passes of attacks: decided once, recorded, kept."""

import json

import pyarrow.parquet as pq
import pytest
import torch

from components.attacks import passes as attack_passes
from components.attacks.passes import AskedPasses, AttackPasses, decided_passes
from components.core.errors import CasemateError
from components.models import compiling
from components.models.checkpoint import load_model
from components.models.compiling import eager
from pipelines import api
from pipelines.recipe.schema.attack import AttackSection
from pipelines.stages.attack import steps
from tests.unit.pipelines.conftest import EPS, InProcess

LIST = [{"kind": "fgsm"}, {"kind": "pgd", "num_steps": 3}]
SECTION = {"models": ["main"], "attacks": LIST, "num_items": 24}


@pytest.fixture
def bfloat16_units(monkeypatch):
    """A processor that says it has units for bfloat16."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)


@pytest.fixture
def fresh_compiler():
    """A compiler that has not met these networks: it gives up after some of one class."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def small_sizes(monkeypatch):
    monkeypatch.setattr(attack_passes, "SIZES", (4, 8, 16))


def outcome(out):
    summary = json.loads((out.path / "summary.json").read_text())
    return pq.read_table(out.path / "attacks.parquet").to_pylist(), summary


def test_the_default_asks_no_worker_and_writes_what_it_wrote(run_attack):
    executor = InProcess()
    _, summary = outcome(run_attack(SECTION, executor=executor))
    assert not [name for name in executor.done if name.startswith("probe")]
    assert "passes" not in summary
    assert set(summary["threat"]) == {"kind", "unit", "eps"}
    section = AttackSection(eps=EPS, attacks=LIST).model_dump(mode="json")
    assert not {"precision", "compiled"} & set(section)  # fingerprints stay


@pytest.mark.usefixtures("bfloat16_units")
def test_a_reduced_precision_is_attacked_as_itself_and_named(run_attack, models):
    plain, _ = outcome(run_attack(SECTION))
    out = run_attack({**SECTION, "precision": "bfloat16"})
    rows, summary = outcome(out)
    assert summary["threat"]["precision"] == summary["passes"]["precision"] == "bfloat16"
    names = {row["what"] for row in steps.headlines([(None, out.path)])}
    assert names == {"clean, bfloat16", *(f"{n} linf 0.1, bfloat16" for n in ("fgsm", "pgd-3-ce"))}
    kinds = [[row[key] for row in table] for table in (rows, plain) for key in ("item_id", "label")]
    assert kinds[:2] == kinds[2:]
    network = load_model(models["main"] / "model")
    x = torch.rand(5, *network_shape(network), generator=torch.Generator().manual_seed(0))
    reduced = AttackPasses(micro_batch=5, compiled=False, precision="bfloat16").logits_of(network)(
        x
    )
    assert reduced.dtype == torch.float32
    assert 0 < (reduced - network(x)).abs().max() < 0.5  # another function, but a close one
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(reduced, network(x).float())


def network_shape(network):
    return network.spec.channels, network.spec.image_size, network.spec.image_size


def test_a_precision_that_the_processor_emulates_is_refused_in_one_line(run_attack, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with pytest.raises(CasemateError, match=r"^attack\.precision: bfloat16 is not supported by"):
        run_attack({**SECTION, "precision": "bfloat16"})


def test_auto_is_float32_on_a_cpu_and_the_fastest_exact_enough_of_a_gpu(monkeypatch):
    asked = AskedPasses(micro_batch=8, compiled=False, precision="auto")
    assert not asked.is_decided
    fast = {"bfloat16", "tf32"}
    monkeypatch.setattr("components.core.precision.is_fast", lambda name, device: name in fast)
    chosen = attack_passes.resolve_precision("auto", "cuda", fastest=attack_passes.FASTEST)
    assert chosen == "tf32"  # never bfloat16: attacks could be weaker
    switches = AttackPasses(micro_batch=8, compiled=False, precision="tf32").arithmetic
    assert switches.tf32_matmul
    assert switches.tf32_conv


@pytest.mark.usefixtures("small_sizes")
def test_measured_rows_are_recorded_and_kept_by_a_resumed_step(run_attack, tmp_path, monkeypatch):
    section = {**SECTION, "micro_batch": "auto"}
    monkeypatch.setattr(attack_passes, "fastest_micro_batch", lambda run, sizes, device: sizes[1])
    first, second = InProcess(), InProcess()
    first.stop_after = 2  # the probe and one unit
    with pytest.raises(KeyboardInterrupt):
        run_attack(section, out=tmp_path, executor=first)
    monkeypatch.setattr(attack_passes, "fastest_micro_batch", lambda run, sizes, device: sizes[2])
    rows, summary = outcome(run_attack(section, out=tmp_path, executor=second))
    assert summary["passes"]["micro_batch"] == 8  # not measured again
    assert not [name for name in second.done if name.startswith("probe")]
    named, _ = outcome(run_attack({**SECTION, "micro_batch": 8}))
    assert rows == named


@pytest.mark.usefixtures("small_sizes")
def test_rows_are_measured_with_real_gradients(models):
    network = load_model(models["main"] / "model")
    x = torch.rand(3, *network_shape(network), generator=torch.Generator().manual_seed(0))
    found = decided_passes(AskedPasses(micro_batch="auto", compiled=False), network, x)
    assert found.micro_batch in (4, 8, 16)
    assert found.precision == "float32"


def test_units_fill_a_pass():
    from pipelines.stages.attack.units import clean_units

    sizes = {
        rows: [u.num_items for u in clean_units("m", 600, micro_batch=rows)]
        for rows in (35, 100, 300)
    }
    assert sizes[35] == sizes[100] == [100] * 6
    assert sizes[300] == [300, 300]


@pytest.mark.usefixtures("fresh_compiler")
def test_a_failed_compiler_is_told_and_the_attack_goes_on(run_attack, monkeypatch, capsys):
    def broken(graph, inputs):
        raise RuntimeError("no compiler here")

    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda net: real(net, backend=broken))
    rows, summary = outcome(run_attack({**SECTION, "compiled": True}))
    assert not summary["passes"]["compiled"]
    assert "no compiler here" in summary["passes"]["why_eager"]
    assert "goes on without compiled passes" in capsys.readouterr().err
    assert rows == outcome(run_attack(SECTION))[0]


@pytest.mark.cluster  # eight seconds
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_networks_are_attacked_alike_and_checked_by_their_own_code(
    run_attack, monkeypatch
):
    """With a compiler that only records; torch's own is tried by a cluster test of training."""
    traced = []

    def record(graph, inputs):
        traced.append(graph)
        return graph.forward

    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda net: real(net, backend=record))
    section = {**SECTION, "sanity": {"num_items": 8}}
    rows, summary = outcome(run_attack({**section, "compiled": True}))
    assert traced
    assert summary["passes"]["compiled"]
    expected, plain = outcome(run_attack(section))
    assert rows == expected
    assert summary["models"]["main"]["sanity"] == plain["models"]["main"]["sanity"]


@pytest.mark.usefixtures("fresh_compiler")
def test_eager_code_runs_inside_the_context_only(models, monkeypatch):
    network = load_model(models["main"] / "model")
    ran = []
    real = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda net: real(net, backend=lambda g, _: counted(g, ran))
    )
    assert compiling.compile_network(network) is None
    x = torch.zeros(2, *network_shape(network))
    with torch.no_grad():
        network(x)
        before = len(ran)
        with eager(network.net):
            network(x)
        assert len(ran) == before > 0
        network(x)
    assert len(ran) > before


def counted(graph, ran):
    def forward(*inputs):
        ran.append(None)
        return graph.forward(*inputs)

    return forward


def test_compiled_passes_and_scaled_attention_are_refused_together():
    entry = {"kind": "aas", "inner": {"kind": "pgd", "num_steps": 3}}
    with pytest.raises(ValueError, match="cannot be combined with aas"):
        AttackSection(eps=EPS, attacks=[entry], compiled=True)


@pytest.mark.usefixtures("bfloat16_units")
def test_in_python_the_report_names_the_precision(models):
    network = load_model(models["main"] / "model")
    images = torch.rand(4, *network_shape(network), generator=torch.Generator().manual_seed(0))
    labels = network(images).argmax(dim=1)
    where = {"eps": EPS, "attacks": "pgd-10"}
    report = api.attack(network, images, labels, precision="bfloat16", **where)
    assert report.precision == "bfloat16"
    assert api.attack(network, images, labels, **where).precision == "float32"
