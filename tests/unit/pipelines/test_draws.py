"""l2 certificates through the stage, without Ray: every method, any order, kills and resumes."""

import json
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from components.certify.certificate import write_certificate
from components.certify.header import VotesHeader
from components.certify.l2 import voters
from components.certify.l2.claims import certified_radius
from components.certify.l2.draws import DrawLedger
from components.certify.l2.evidence import declare, plan_of
from components.certify.l2.noise import predict_block
from components.certify.l2.sequential import certify_prefix, choose_class
from components.certify.l2.voters import block_stop
from components.certify.registry import family_of
from components.certify.verify import verify
from components.certify.vote_rows import VoteRow
from components.certify.votes import read_votes, write_votes
from components.core.confidence_sequences import anytime_interval
from components.core.digests import digest_json
from components.core.errors import CasemateError
from components.core.noise_streams import noise_impl, noise_stream
from components.core.seeding import DrawSpan
from components.data.prepared import PreparedDataset
from components.models.checkpoint import load_model, save_model
from pipelines.recipe.load import parse
from pipelines.stages.certify.resample import resample
from tests.unit.pipelines.conftest import InProcess, certify_in_process, train

SIGMA, NUM_ITEMS, SEED = 0.3, 6, 5
SECTION = {
    "kind": "gaussian", "sigma": SIGMA, "num_items": NUM_ITEMS, "num_select": 40,
    "num_estimate": 400, "block_size": 80, "micro_batch": 20, "radii": [0.2, 0.4],
}  # fmt: skip
SEQUENTIAL = {**SECTION, "method": "sequential", "look_every": 32}
FILES = ("votes.parquet", "certificates.parquet", "certificate.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory, prepared):
    """Trained under the noise: some items are certified, some given up, some close."""
    folder = tmp_path_factory.mktemp("noisy")
    save_model(folder / "model", train(prepared, num_epochs=7, sigma=SIGMA), recipe_digest="")
    return folder


@pytest.fixture(scope="module")
def run(prepared, model, tmp_path_factory):
    def certified(section, *, executor=None, place=None):
        inputs = {"prepare": prepared, "train.main": model}
        place = place or tmp_path_factory.mktemp("certify")
        return certify_in_process(section, inputs, place, executor=executor)

    return certified


@pytest.fixture(scope="module")
def sequential(run):
    executor = InProcess()
    out = run(SEQUENTIAL, executor=executor)
    return out, executor.done


@pytest.fixture(scope="module")
def fixed(run):
    return run(SECTION)


def document(out):
    return json.loads((out.path / "certificate.json").read_text())


def claims(out):
    return pq.read_table(out.path / "certificates.parquet").to_pylist()


def same_bytes(a, b):
    return all((a.path / name).read_bytes() == (b.path / name).read_bytes() for name in FILES)


def first_items(self, name):
    return self.load(name, limit=NUM_ITEMS)


def test_votes_are_the_draws_up_to_the_deciding_look(sequential, model, prepared):
    votes = read_votes(sequential[0].path / "votes.parquet")
    net, test = load_model(model / "model"), PreparedDataset.open(prepared).load("test", limit=3)
    stored = {item.item_id: item.streams for item in votes.items()}
    for i, item_id in enumerate(test.item_ids):
        drawn = {
            stream: predict_block(
                net, test.pixels()[i],
                DrawSpan(SEED, noise_stream("sequential", stream), item_id, 0, stop),
                sigma=SIGMA, micro_batch=20, device="cpu",
            )
            for stream, stop in (("select", 40), ("estimate", 400))
        }  # fmt: skip
        choice = choose_class(drawn["select"], num_classes=10, num_select=40)
        claim = certify_prefix(drawn["estimate"], plan_of(votes.header), chosen=choice.chosen)
        assert stored[item_id]["select"].tolist() == drawn["select"][: choice.n0].tolist()
        assert stored[item_id]["estimate"].tolist() == drawn["estimate"][: claim.n].tolist()


def test_verdicts_are_those_of_all_draws_but_for_borderline_items(sequential, fixed):
    differing = [
        (a["k"] / a["n"], b["n"])
        for a, b in zip(claims(fixed), claims(sequential[0]), strict=True)
        for r in SECTION["radii"]
        if (a["radius"] >= r) != (b["radius"] >= r)
    ]
    assert len(differing) <= 2
    assert all(n > 150 for _, n in differing)  # those that took long
    held = document(sequential[0])["summary"]["certified"][0]["accuracy"]["value"]
    assert 0.2 < held < 1


def test_decided_items_draw_no_more(sequential, prepared):
    out, done = sequential
    used = {row["item_id"]: row["n"] for row in claims(out)}
    assert len(set(used.values())) > 1
    for index, item_id in enumerate(
        PreparedDataset.open(prepared).load("test").item_ids[:NUM_ITEMS]
    ):
        starts = [int(name[-9:]) for name in done if name.startswith(f"item-{index:08d}-")]
        assert max(starts) < used[item_id]  # the block before the last one had not decided
    figures = document(out)["summary"]["draws_used"]
    assert figures["total"] == sum(used.values()) < NUM_ITEMS * 400
    assert out.run.logged["certify/p/draws_used"] == figures["mean"]


def test_order_and_blocks_drawn_ahead_change_nothing(run, sequential):
    backwards = InProcess(order=lambda units: units[::-1], room=20)
    assert same_bytes(run(SEQUENTIAL, executor=backwards), sequential[0])
    assert len(backwards.done) > len(sequential[1])  # some were drawn ahead in vain


def test_kills_and_resumes_change_nothing(run, sequential, tmp_path):
    killed = InProcess(order=lambda units: units[::-1], room=5)
    for stop in (3, 8):
        killed.stop_after = stop
        with pytest.raises(KeyboardInterrupt):
            run(SEQUENTIAL, executor=killed, place=tmp_path)
    killed.stop_after = None
    assert same_bytes(run(SEQUENTIAL, executor=killed, place=tmp_path), sequential[0])
    assert len(killed.done) == len(set(killed.done))  # nothing is drawn twice


def test_the_size_of_blocks_decides_nothing(run, sequential):
    assert claims(run({**SEQUENTIAL, "block_size": 400})) == claims(sequential[0])


def test_certificates_verify_and_votes_repeat(sequential, fixed, model, prepared):
    places = {"model": model / "model", "data": prepared}
    for out in (sequential[0], fixed):
        assert verify(out.path).problems == []
        with mock.patch.object(PreparedDataset, "on_demand", first_items):
            assert resample(out.path, count=3, **places) == []
            shifted = mock.patch(
                "components.certify.l2.voters.predict_block",
                lambda *a, **k: (predict_block(*a, **k) + 1) % 10,
            )
            with shifted:
                assert "votes differ" in resample(out.path, count=1, **places)[0]


def test_the_label_is_decided_where_radius_zero_is_declared(run, sequential):
    out = run({**SEQUENTIAL, "radii": [0, 0.2, 0.4]})
    answered, bare = (
        document(o)["summary"]["standard_accuracy"]["value"] for o in (out, sequential[0])
    )
    assert answered >= bare
    assert document(out)["summary"]["certified"][0]["accuracy"]["value"] == answered
    assert verify(out.path).problems == []


@pytest.fixture(scope="module")
def randomized(run):
    return run({**SECTION, "method": "randomized"})


def test_randomised_radii_are_never_smaller(randomized):
    for lucky in claims(randomized):
        plain = certified_radius(lucky["k"], lucky["n"], sigma=SIGMA, failure_prob=0.001)
        assert plain <= lucky["radius"]
    assert verify(randomized.path).problems == []
    assert randomized.run.logged["certify/p/prediction_accuracy"] > 0.2


def forged(out, place, *, method):
    """The votes of `out` as another method's, with header and certificate to match."""
    votes = read_votes(out.path / "votes.parquet")
    settings = {key: v for key, v in votes.header.settings.items() if key != "declared"}
    if method == "sequential":
        settings["declared"] = declare(
            radii=[0.2, 0.4], failure_prob=0.001, look_every=32, futility_prob=0.01
        )
    header = votes.header.to_dict() | {
        "settings": settings | {"method": method}, "noise_impl": noise_impl(method)
    }  # fmt: skip
    rows = []
    for item in votes.items():
        streams = dict(item.streams)
        if method == "sequential":
            choice = choose_class(streams["select"], num_classes=10, num_select=40)
            claim = certify_prefix(
                streams["estimate"], plan_of(VotesHeader.from_dict(header)), chosen=choice.chosen
            )
            streams["select"] = streams["select"][: choice.n0]
            streams["estimate"] = streams["estimate"][: claim.n]
        rows += [
            VoteRow(item.item_id, item.label, item.image_sha256, name, 0, len(found), found)
            for name, found in streams.items()
        ]
    place.mkdir()
    again = write_votes(place / "votes.parquet", rows, header)
    write_certificate(place, again, {"failure_prob": 0.001, "radii": [0.2, 0.4]})
    return place


@pytest.mark.parametrize("method", ["randomized", "sequential"])
def test_a_method_chosen_after_the_draws_shows_when_they_are_drawn_again(
    fixed, method, model, prepared, tmp_path
):
    folder = forged(fixed, tmp_path / "forged", method=method)
    assert verify(folder).problems == []  # consistent in itself
    with mock.patch.object(PreparedDataset, "on_demand", first_items):
        found = resample(folder, count=NUM_ITEMS, model=model / "model", data=prepared)
    assert found == [
        f"votes.parquet: its draws are those of method fixed, not of {method}: choosing a "
        "method after seeing draws voids the failure probability"
    ]


def test_randomised_votes_cannot_pass_for_fixed_ones(randomized, model, prepared, tmp_path):
    honest, places = randomized.path, {"model": model / "model", "data": prepared}
    with mock.patch.object(PreparedDataset, "on_demand", first_items):
        assert resample(honest, count=3, **places) == []
        folder = forged(randomized, tmp_path / "forged", method="fixed")
        (found,) = resample(folder, count=NUM_ITEMS, **places)
    assert "those of method randomized, not of fixed" in found
    header = read_votes(folder / "votes.parquet").header.to_dict()
    write_votes(  # a header whose method alone was changed does not even get that far
        folder / "votes.parquet",
        read_votes(folder / "votes.parquet").rows(),
        header | {"settings": header["settings"] | {"method": "randomized"}},
    )  # fmt: skip
    votes = read_votes(folder / "votes.parquet")
    write_certificate(folder, votes, {"failure_prob": 0.001, "radii": [0.2, 0.4]})
    (found,) = verify(folder).problems
    assert "noise_impl is 'certv1-philox-numpy', method randomized draws by" in found


def test_challenges_judge_sequential_claims(run):
    settings = {"eps": 0.2, "num_items": 3, "num_steps": 1, "num_draws": 2, "num_predict": 40}
    out = run({**SEQUENTIAL, "challenge": settings})
    assert json.loads((out.path / "challenge.json").read_text())["broken_certified"] == 0


def test_a_radius_out_of_reach_is_refused_before_any_draw(run):
    nobody = mock.Mock(side_effect=AssertionError("drew"))
    for method in ("fixed", "sequential", "randomized"):
        with pytest.raises(CasemateError, match=r"certify\.p\.radii: 0.9 is above"):
            run({**SECTION, "method": method, "radii": [0.2, 0.9]}, executor=nobody)


@pytest.fixture
def section():
    values = {"name": "x", "data": {"source": "digits"}, "train": {}, "certify": {"p": SEQUENTIAL}}
    return parse(values, source="x").certify["p"]


def test_blocks_grow_from_one_micro_batch(section):
    stops = [0]
    while stops[-1] < 400:
        stops.append(block_stop(section, stops[-1]))
    assert stops == [0, 20, 40, 80, 160, 240, 320, 400]


def test_the_live_band_holds_and_ends_at_the_share(sequential, section):
    """Replayed block by block: the band covers what comes out at the end."""
    out, done = sequential
    header = read_votes(out.path / "votes.parquet").header
    ledger, parts = (
        DrawLedger(section, header),
        out.parts("votes", run_id=digest_json(header.to_dict())),
    )
    final = 100 * document(out)["summary"]["certified"][0]["accuracy"]["value"]
    assert ledger.certified_so_far() == ""
    while units := ledger.next(1, ahead=1):
        for unit in units:
            ledger.keep(unit, ledger.brief(parts.load(unit.name)))
        if said := ledger.certified_so_far():
            assert said.startswith("certified at 0.2: ")
            low, high = map(float, said.split("band ")[1].split(" to "))
            assert low - 0.06 <= final <= high + 0.06  # printed with one decimal
    assert f"{final:.1f}% of the first {NUM_ITEMS}" in ledger.certified_so_far()
    assert ledger.certified_so_far().endswith(f"band {final:.1f} to {final:.1f}")
    assert sum(item.requested > 0 for item in ledger.items) == NUM_ITEMS <= len(done)


def test_the_band_is_a_confidence_sequence():
    """At level 0.05 at most one stream in twenty is ever left outside, peeking at every item."""
    rng, missed, share, length = np.random.default_rng(1), 0, 0.6, 60
    for _ in range(100):
        held = np.cumsum(rng.random(length) < share)
        bands = [anytime_interval(int(held[t - 1]), t, 0.05) for t in range(5, length + 1, 5)]
        missed += any(not low <= share <= high for low, high in bands)
    assert missed <= 13  # 99.9% quantile of Bin(100, 0.05)


def estimates(out):
    votes = read_votes(out.path / "votes.parquet")
    return {item.item_id: item.streams["estimate"].tolist() for item in votes.items()}


@pytest.mark.parametrize("method", ["fixed", "sequential"])
def test_draws_of_the_other_generator_are_recorded_and_repeated(
    run, fixed, model, prepared, tmp_path_factory, method
):
    section = (SECTION if method == "fixed" else SEQUENTIAL) | {"noise": "philox"}
    place, killed = tmp_path_factory.mktemp("philox"), InProcess()
    killed.stop_after = 7
    with pytest.raises(KeyboardInterrupt):
        run(section, executor=killed, place=place)
    out = run(section, place=place)
    assert document(out)["evidence"]["noise_impl"] == noise_impl(method, "philox")
    assert verify(out.path).problems == []
    assert same_bytes(out, run(section))
    assert estimates(out) != estimates(fixed)
    places = {"model": model / "model", "data": prepared}
    with mock.patch.object(PreparedDataset, "on_demand", first_items):
        assert resample(out.path, count=3, **places) == []


def test_draws_cannot_pass_for_those_of_the_other_generator(fixed, model, prepared, tmp_path):
    votes = read_votes(fixed.path / "votes.parquet")
    header = votes.header.to_dict() | {"noise_impl": noise_impl("fixed", "philox")}
    write_votes(tmp_path / "votes.parquet", votes.rows(), header)
    places = {"model": model / "model", "data": prepared}
    with mock.patch.object(PreparedDataset, "on_demand", first_items):
        assert any("votes differ" in found for found in resample(tmp_path, count=6, **places))
        header["noise_impl"] = "dice"
        write_votes(tmp_path / "votes.parquet", votes.rows(), header)
        with pytest.raises(CasemateError, match="noise_impl of the votes: dice draws in a way"):
            resample(tmp_path, count=1, **places)


def test_a_reduced_classifier_is_certified_by_name_and_repeated(run, model, prepared, capsys):
    section, places = SECTION | {"precision": "bfloat16"}, {"model": model / "model"}
    units = mock.patch.object(torch.cpu, "_is_avx512_bf16_supported", return_value=False)
    with units, pytest.raises(CasemateError, match=r"certify.precision: bfloat16 is not supported"):
        run(section)
    with (
        mock.patch.object(torch.cpu, "_is_avx512_bf16_supported", return_value=True),
        mock.patch.object(PreparedDataset, "on_demand", first_items),
    ):
        out = run(section)
        assert resample(out.path, count=2, data=prepared, **places) == []
    header = read_votes(out.path / "votes.parquet").header
    assert header.settings["precision"] == "bfloat16"
    assert family_of("gaussian").vote_words(header).endswith("classified in bfloat16")
    assert "those of the classifier in bfloat16" in capsys.readouterr().err
    assert out.run.registered[0]["settings"]["precision"] == "bfloat16"
    assert verify(out.path).problems == []


def the_last_that_runs(run, sizes, *, device):
    assert len(run(sizes[-1])) == sizes[-1]
    return sizes[-1]


def test_a_measured_micro_batch_is_recorded_and_kept(run, model, prepared, tmp_path_factory):
    section, place = SECTION | {"micro_batch": "auto"}, tmp_path_factory.mktemp("auto")
    killed = InProcess()
    killed.stop_after = 3  # the measurement is the first unit
    with (
        mock.patch.object(voters, "fastest_micro_batch", side_effect=the_last_that_runs),
        pytest.raises(KeyboardInterrupt),
    ):
        run(section, executor=killed, place=place)
    with mock.patch.object(voters, "fastest_micro_batch", side_effect=AssertionError("again")):
        out = run(section, place=place)
    assert document(out)["evidence"]["settings"]["micro_batch"] == 40  # 20 and 40 divide 80
    assert out.run.registered[0]["settings"]["micro_batch"] == 40
    assert same_bytes(out, run(SECTION | {"micro_batch": 40}))
    places = {"model": model / "model", "data": prepared}
    with mock.patch.object(PreparedDataset, "on_demand", first_items):
        assert resample(out.path, count=2, **places) == []


@pytest.fixture
def compiler(monkeypatch):
    """Stands in for the compiler of torch, which takes half a minute: records what it is given."""
    given, real = [], torch.nn.Module.compile

    def record(graph, inputs):
        given.append(graph)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda net: real(net, backend=record))
    torch._dynamo.reset()  # it gives up after some networks of one class
    yield given
    torch._dynamo.reset()


def test_compiled_draws_are_recorded_and_repeated(run, fixed, model, prepared, compiler):
    out = run(SECTION | {"compiled": True})
    assert compiler
    header = read_votes(out.path / "votes.parquet").header
    assert header.settings["compiled"] is True
    assert "compiled" not in read_votes(fixed.path / "votes.parquet").header.settings
    assert estimates(out) == estimates(fixed)
    assert verify(out.path).problems == []
    compiler.clear()
    torch._dynamo.reset()
    with mock.patch.object(PreparedDataset, "on_demand", first_items):
        assert resample(out.path, count=2, model=model / "model", data=prepared) == []
    assert compiler  # by compiled passes again


def test_draws_whose_compiler_fails_are_told_and_as_without_it(run, fixed, monkeypatch, capsys):
    monkeypatch.setattr(
        torch.nn.Module, "compile", mock.Mock(side_effect=RuntimeError("no\ncompiler"))
    )
    out = run(SECTION | {"compiled": True})
    assert "goes on without compiled passes: torch.compile failed: no compiler" in (
        capsys.readouterr().err
    )
    assert "compiled" not in read_votes(out.path / "votes.parquet").header.settings
    assert estimates(out) == estimates(fixed)
