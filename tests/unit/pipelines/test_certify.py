"""Patch certificates through the stage, without Ray: every kind, its check and its refusals."""

import contextlib
import json
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from components.attacks import patch as patch_attack
from components.certify.patch import certificate as patch_certificate
from components.certify.patch import voters as voting
from components.certify.patch.double_masking import infer
from components.certify.verify import recertify, verify
from components.certify.vote_rows import VoteRow
from components.certify.votes import read_votes, write_votes
from components.core.arithmetic import EXACT, in_use
from components.core.errors import CasemateError
from components.data.ablation import Ablations
from components.data.prepared import PreparedDataset
from components.models.checkpoint import load_model, save_model
from components.models.voting import FAST, AblationPredictor
from pipelines.stages.certify import challenge
from pipelines.stages.certify.resample import resample
from tests.unit.pipelines.conftest import InProcess, certify_in_process, train

SIDE, NUM_ITEMS = 8, 10
CHALLENGE = {"patch_size": 1, "num_items": 4, "num_steps": 1, "num_positions": 2}
KINDS = {
    "columns": {"band": 3, "stride": 2},
    "rows": {"band": 2},
    "blocks": {"band": 5, "stride": 3},
    "both": {"band": 4, "stride": 3},
    "double_masking": {"mask_patch": 2, "num_masks": 2, "patch_sizes": [1, 2]},
}
UNSEEN = 65535


@pytest.fixture(scope="module")
def model(tmp_path_factory, prepared):
    """Trained on whole digits and told it was on columns: bands of half the image often agree."""
    trained = {"kind": "columns", "band": 3}
    model = train(prepared, num_epochs=3, token_policy="drop", trained_for=trained)
    folder = tmp_path_factory.mktemp("voter")
    save_model(folder / "model", model, recipe_digest="")
    return folder


@pytest.fixture(scope="module")
def run(prepared, model, tmp_path_factory):
    def certified(section, *, executor=None, part="p", inputs=None):
        values = {"patch_sizes": [1], "num_items": NUM_ITEMS, "micro_batch": 4, **section}
        inputs = {"prepare": prepared, "train.main": model, **(inputs or {})}
        place = tmp_path_factory.mktemp("certify")
        return certify_in_process(values, inputs, place, part=part, executor=executor)

    return certified


def votes_of(out):
    votes = read_votes(out.path / "votes.parquet")
    return {item.item_id: next(iter(item.streams.values())) for item in votes.items()}


def document_of(out):
    return json.loads((out.path / "certificate.json").read_text())


@pytest.fixture(scope="module")
def finished(run):
    return {
        kind: run({"kind": kind, **settings, "challenge": CHALLENGE})
        for kind, settings in KINDS.items()
    }


def naive_votes(model, image, kind):
    """Every mask alone, from the definition."""
    settings, net = KINDS[kind], load_model(model / "model")
    if kind == "double_masking":  # two masks per side of 8 pixels for patches of 2
        hidden = []
        for top in (0, 3):
            for left in (0, 3):
                mask = torch.zeros(SIDE, SIDE, dtype=torch.bool)
                mask[top : top + 5, left : left + 5] = True
                hidden.append(mask)
        shown = [~(a | b) for i, a in enumerate(hidden) for b in hidden[i:]]
    else:
        shown = Ablations(
            kind=kind, image_size=(SIDE, SIDE), band=settings["band"],
            stride=settings.get("stride", 1),
        ).masks()  # fmt: skip
    with torch.no_grad():
        logits = [net.forward_ablated(image[None], mask[None]) for mask in shown]
    return torch.cat(logits).argmax(dim=1)


@pytest.mark.parametrize("kind", KINDS)
def test_votes_are_those_of_every_mask_alone(finished, model, prepared, kind):
    votes = votes_of(finished[kind])
    test = PreparedDataset.open(prepared).load("test", limit=NUM_ITEMS)
    assert sorted(votes) == sorted(test.item_ids)
    for i in (0, 7):
        expected = naive_votes(model, test.pixels()[i], kind)
        assert votes[test.item_ids[i]].tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_certificates_verify_and_votes_repeat(finished, model, prepared, kind):
    out = finished[kind]
    assert verify(out.path).problems == []
    places = {"model": model / "model", "data": prepared}
    with mock.patch.object(PreparedDataset, "on_demand", first_items):
        assert resample(out.path, count=3, **places) == []
        voter = voting.PairVoter if kind == "double_masking" else voting.AblationVoter
        honest = voter.votes
        with mock.patch.object(voter, "votes", lambda *args: (honest(*args) + 1) % 10):
            (problem,) = resample(out.path, count=1, **places)
    assert "votes differ" in problem
    assert document_of(out)["sound"]
    assert out.run.tagged == {"certify/p/sound": True, "casemate.device": "cpu"}


def first_items(self, name):
    return self.load(name, limit=NUM_ITEMS)


@pytest.mark.parametrize("kind", KINDS)
def test_challenges_leave_certified_items_standing(finished, kind):
    result = json.loads((finished[kind].path / "challenge.json").read_text())
    assert result["num_items"] == CHALLENGE["num_items"]
    assert result["broken_certified"] == 0
    assert result["certified"]["value"] <= result["standing"]["value"]


HARD = {"patch_size": 4, "num_items": 6, "num_steps": 3, "num_positions": 2}


def assert_refuted(run, section):
    """One certified item that falls fails the stage, and nothing is left that looks valid."""
    place = []
    real = challenge.run
    with (
        mock.patch.object(challenge, "run", lambda *args: place.append(args[3]) or real(*args)),
        pytest.raises(RuntimeError, match="the certificate is wrong, do not use it") as caught,
    ):
        run(section)
    (out,) = place
    result = json.loads((out.path / "challenge.json").read_text())
    assert result["broken_certified"] == len(result["broken_items"]) > 0
    assert all(item in str(caught.value) for item in result["broken_items"])
    assert not (out.path / "certificate.json").exists()
    assert not (out.path / "manifest.json").exists()
    return json.loads((out.path / "certificate.refuted.json").read_text())


def test_the_published_count_is_refuted_at_the_seam(run):
    """A real attack on a claim that ignores the seam: all four squares show what the patch covers,
    the published count says one."""
    section = {"kind": "blocks", "band": 4, "stride": 7, "patch_sizes": [4]}
    wrong = {"delta_rule": "paper_reference", "challenge": HARD}
    document = assert_refuted(run, section | wrong)
    assert document["sound"] is False
    (entry,) = document["summary"]["certified"]
    assert (entry["num_touched"], entry["exact_touched"]) == (1, 4)
    assert entry["accuracy"]["value"] > 0
    exact = document_of(run(section))  # claims nothing here
    assert exact["sound"] is True
    assert exact["summary"]["certified"][0]["accuracy"]["value"] == 0


@pytest.mark.parametrize(
    "section",
    [
        {"kind": "columns", "band": 4},
        {"kind": "columns", "band": 4, "stop_early": True},
        {"kind": "rows", "band": 4, "rule": "strict", "second_rule": "loc"},
        {"kind": "both", "band": 4, "stride": 4},
        {"kind": "double_masking", "mask_patch": 4, "num_masks": 2},
    ],
)
def test_claims_that_are_too_large_are_refuted(run, section):
    """Everything is called certified, under the last rule only; the stage finds out by itself."""

    def everything(*args, certify, **kwargs):
        claims = certify(*args, **kwargs)
        last = section.get("second_rule", kwargs.get("rule"))
        too_much = np.ones_like(claims.certified) if kwargs.get("rule") == last else None
        return claims if too_much is None else replace(claims, certified=too_much)

    with contextlib.ExitStack() as stack:
        for name in ("certify", "certify_partial", "certify_pairs"):
            wrong = partial(everything, certify=getattr(patch_certificate, name))
            stack.enter_context(mock.patch.object(patch_certificate, name, wrong))
        assert_refuted(run, {"patch_sizes": [4], "challenge": HARD, **section})


def test_double_masking_is_judged_by_its_own_procedure(finished):
    """Where masks disagree the hard vote and `infer` differ; the certificate holds the latter."""
    out = finished["double_masking"]
    rows = {r["item_id"]: r for r in pq.read_table(out.path / "certificates.parquet").to_pylist()}
    pairs = [(i, j) for i in range(4) for j in range(i, 4)]
    for item_id, votes in votes_of(out).items():
        table = {frozenset(pair): int(v) for pair, v in zip(pairs, votes, strict=True)}
        expected = infer(
            lambda asked, table=table: np.array([table[frozenset(p)] for p in asked.tolist()]),
            num_masks=4,
        )
        assert rows[item_id]["prediction"] == expected
        assert bool(rows[item_id]["certified_patch_sizes"]) == (len(set(votes.tolist())) == 1)


@pytest.mark.parametrize("kind", ["columns", "blocks"])
def test_stopping_early_gives_the_claims_of_all_votes(run, model, prepared, kind):
    geometry = {"columns": {"band": 5}, "blocks": {"band": 6, "stride": 2}}[kind]
    section = {"kind": kind, **geometry, "patch_sizes": [1, 2], "second_rule": "loc"}
    whole = run(section)
    early = run({**section, "stop_early": True, "challenge": CHALLENGE})
    asked = votes_of(early)
    for item_id, votes in votes_of(whole).items():
        seen = asked[item_id] != UNSEEN
        assert (asked[item_id][seen] == votes[seen]).all()
    assert any((votes == UNSEEN).any() for votes in asked.values())
    tables = [pq.read_table(o.path / "certificates.parquet").to_pylist() for o in (whole, early)]
    for name in ("prediction", "certified_patch_sizes", "certified_patch_sizes_loc"):
        assert [row[name] for row in tables[0]] == [row[name] for row in tables[1]]
    assert early.run.logged["certify/p/votes_asked"] < 1
    assert whole.run.logged["certify/p/ablation_accuracy"] > 0.1
    assert verify(early.path).problems == []
    with mock.patch.object(PreparedDataset, "on_demand", first_items):
        assert resample(early.path, count=3, model=model / "model", data=prepared) == []
    with pytest.raises(CasemateError, match="stopped early"):
        recertify(early.path, early.path.parent / f"{early.path.name}-new", patch_sizes=[3])


def test_units_and_their_order_change_nothing(run, finished):
    backwards = InProcess(order=lambda units: units[::-1])
    with mock.patch.object(voting, "VOTES_PER_UNIT", 30):
        other = run({"kind": "rows", **KINDS["rows"], "challenge": CHALLENGE}, executor=backwards)
    assert len([name for name in backwards.done if name.startswith("items-")]) == 4
    (watched,) = {name for told in backwards.so_far for name in told.shares}
    size = int(watched.removeprefix("accuracy_at_"))
    (entry,) = [e for e in document_of(other)["summary"]["certified"] if e["patch_size"] == size]
    told_by = zip(backwards.done, backwards.so_far, strict=True)  # also probe and challenge
    votes = [told for name, told in told_by if name.startswith("items-")]
    assert not any(told.shares for told in votes[:3])  # the first items come last
    assert votes[-1].shares[watched].value == entry["accuracy"]["value"]
    assert votes[-1].shares[watched].band() == (entry["accuracy"]["value"],) * 2
    for name in ("votes.parquet", "certificates.parquet", "certificate.json", "challenge.json"):
        assert (other.path / name).read_bytes() == (finished["rows"].path / name).read_bytes()


def test_a_coarser_stride_takes_finer_votes_and_repeats_them(run, model, prepared):
    """No pass is made; the voters that `resample` asks again are those of the finer stride."""
    sweep = {"kind": "columns", "band": 5, "sweep": {"stride": [1, 4]}}
    fine = run(sweep, part="p-s1")
    idle = InProcess()
    coarse = run(sweep, part="p-s4", executor=idle, inputs={"certify.p-s1": fine.path})
    assert idle.done == []
    for item_id, votes in votes_of(fine).items():
        assert votes_of(coarse)[item_id].tolist() == votes[::4].tolist()
    assert verify(coarse.path).problems == []
    assert document_of(coarse)["evidence"]["settings"]["asked_stride"] == 1
    asked = []
    honest = voting.AblationVoter.votes
    spy = mock.patch.object(
        voting.AblationVoter,
        "votes",
        lambda s, *args: asked.append(len(s.ablations)) or honest(s, *args),
    )
    with mock.patch.object(PreparedDataset, "on_demand", first_items), spy:
        assert resample(coarse.path, count=2, model=model / "model", data=prepared) == []
    assert asked == [SIDE, SIDE]


def test_sizes_of_a_swept_certificate_are_checked_before_the_first_vote(run):
    """Those of all entries are checked by the gate as soon as the images are prepared."""
    sweep = {"kind": "columns", "sweep": {"band": [3, 9]}}
    idle = InProcess()
    with pytest.raises(CasemateError, match=r"certify\.p-b9\.band: 9 is larger than the image"):
        run(sweep, part="p-b9", executor=idle)
    assert idle.done == []


def test_the_published_count_is_marked_unsound(run):
    section = {"kind": "columns", "band": 3, "stride": 3, "patch_sizes": [1]}
    out = run({**section, "delta_rule": "paper_reference", "second_rule": "loc"})
    document = document_of(out)
    assert document["sound"] is False
    (entry,) = document["summary"]["certified"]
    assert entry["num_touched"] < entry["exact_touched"]
    assert {"accuracy", "accuracy_loc"} <= entry.keys()
    assert out.run.tagged == {"certify/p/sound": False, "casemate.device": "cpu"}


def test_tokens_are_kept_black_only_when_asked_for_twice(run, model):
    section = {"kind": "columns", "band": 3, "token_policy": "mask"}
    with pytest.raises(CasemateError, match=r"certify\.p\.token_policy: mask .* \(drop\)"):
        run(section)
    out = run({**section, "allow_token_mismatch": True})
    settings = document_of(out)["evidence"]["settings"]
    assert (settings["token_policy"], settings["trained_token_policy"]) == ("mask", "drop")
    dropped = run({"kind": "columns", "band": 3})
    assert "trained_token_policy" not in document_of(dropped)["evidence"]["settings"]
    assert any((votes_of(out)[i] != votes).any() for i, votes in votes_of(dropped).items())


def test_a_model_that_the_fast_path_misreads_votes_the_plain_way(
    run, finished, model, prepared, capsys
):
    """Said, recorded, and repeated by whoever votes again."""

    def only_plain(predictor):
        return predictor.backend.path == "plain"

    places = {"model": model / "model", "data": prepared}
    with mock.patch.object(AblationPredictor, "agrees_with_plain", only_plain):
        out = run({"kind": "rows", **KINDS["rows"]})
        with mock.patch.object(PreparedDataset, "on_demand", first_items):
            assert resample(out.path, count=2, **places) == []
            with pytest.raises(RuntimeError, match="different logits than the plain path"):
                resample(finished["rows"].path, count=1, **places)
    assert (
        "certify.p: the fast path and the plain path give different logits"
        in capsys.readouterr().err
    )
    ways = [document_of(o)["evidence"]["settings"]["way"] for o in (out, finished["rows"])]
    assert ways == [
        {"path": path, "precision": "float32", "compiled": False} for path in ("plain", "fast")
    ]
    for item_id, votes in votes_of(out).items():
        assert (votes == votes_of(finished["rows"])[item_id]).all()


def test_precision_is_recorded_and_repeated(run, finished, model, prepared):
    section = {"kind": "rows", **KINDS["rows"], "precision": "bfloat16"}
    places = {"model": model / "model", "data": prepared}
    with (
        mock.patch.object(torch.cpu, "_is_avx512_bf16_supported", return_value=False),
        mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=False),
        pytest.raises(CasemateError, match="is not supported by this processor"),
    ):
        run(section)
    with (
        mock.patch.object(torch.cpu, "_is_avx512_bf16_supported", return_value=True),
        mock.patch.object(PreparedDataset, "on_demand", first_items),
    ):
        out = run(section)
        with mock.patch.object(
            voting, "AblationPredictor", wraps=voting.AblationPredictor
        ) as asked:
            assert resample(out.path, count=2, **places) == []
    assert asked.call_args.kwargs["backend"] == replace(FAST, precision="bfloat16")
    assert document_of(out)["evidence"]["settings"]["way"]["precision"] == "bfloat16"
    for item_id, votes in votes_of(out).items():
        assert (votes == votes_of(finished["rows"])[item_id]).all()


@pytest.mark.parametrize("kind", ["columns", "double_masking"])
def test_a_measured_micro_batch_is_recorded_and_changes_no_vote(
    run, finished, model, prepared, kind
):
    auto = {"micro_batch": "auto", **({"precision": "auto"} if kind == "columns" else {})}
    out = run({"kind": kind, **KINDS[kind], **auto})
    recorded = document_of(out)["evidence"]["settings"]
    assert recorded["micro_batch"] in voting.ROWS
    assert recorded.get("way", {}).get("precision", "float32") == "float32"  # on every CPU
    assert verify(out.path).problems == []
    with mock.patch.object(PreparedDataset, "on_demand", first_items):
        assert resample(out.path, count=2, model=model / "model", data=prepared) == []
    for item_id, votes in votes_of(out).items():
        assert (votes == votes_of(finished[kind])[item_id]).all()


def written_votes(folder) -> tuple[dict, list[VoteRow]]:
    """Header and rows of a finished votes file, to be changed and written again."""
    votes = read_votes(folder / "votes.parquet")
    return json.loads(json.dumps(votes.header.to_dict())), list(votes.rows())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"device": "cuda", "float32": EXACT.to_dict()},
            "verify --resample: cuda computed these votes and is not available here: ",
        ),
        (
            {"float32": EXACT.to_dict() | {"tf64": True}},
            "verify --resample: float32: .* are not the switches tf32_matmul, ",
        ),
    ],
)
def test_votes_of_other_arithmetic_are_not_repeated(
    settings, told, finished, model, prepared, tmp_path
):
    header, rows = written_votes(finished["rows"].path)
    header["settings"] |= settings
    write_votes(tmp_path / "votes.parquet", rows, header)
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(CasemateError, match=told) as caught,
    ):
        resample(tmp_path, count=1, model=model / "model", data=prepared)
    assert "\n" not in str(caught.value)


def test_votes_are_repeated_with_the_switches_that_they_record(finished, model, prepared, tmp_path):
    header, rows = written_votes(finished["rows"].path)
    header["settings"]["float32"] = EXACT.to_dict() | {"tf32_matmul": True}
    write_votes(tmp_path / "votes.parquet", rows, header)
    seen, honest, before = [], voting.AblationVoter.votes, in_use()

    def votes(*args):
        seen.append(in_use())
        return honest(*args)

    with (
        mock.patch.object(PreparedDataset, "on_demand", first_items),
        mock.patch.object(voting.AblationVoter, "votes", votes),
    ):
        assert resample(tmp_path, count=1, model=model / "model", data=prepared) == []
    assert seen == [replace(EXACT, tf32_matmul=True)]
    assert in_use() == before


def test_votes_from_before_there_was_a_choice_can_be_repeated(finished, model, prepared, tmp_path):
    header, rows = written_votes(finished["rows"].path)
    del header["settings"]["way"]
    write_votes(tmp_path / "votes.parquet", rows, header)
    with mock.patch.object(PreparedDataset, "on_demand", first_items):
        assert resample(tmp_path, count=2, model=model / "model", data=prepared) == []
        header["settings"]["way"] = {"path": "scenic"}
        write_votes(tmp_path / "votes.parquet", rows, header)
        with pytest.raises(CasemateError, match="not a record of how votes were computed"):
            resample(tmp_path, count=2, model=model / "model", data=prepared)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"kind": "columns", "band": 9}, r"certify\.p\.band: 9 is larger than the image \(8\)"),
        ({"kind": "rows", "band": 2, "stride": 9}, r"certify\.p\.stride: 9 is larger"),
        ({"kind": "blocks", "band": 2, "patch_sizes": [9]}, r"certify\.p\.patch_sizes: 9 is lar"),
        ({"kind": "rows", "stride": 0, "band": 2}, r"certify\.p.*stride"),
        ({"kind": "blocks"}, r"certify\.p\.band: .* not trained on blocks"),
        ({"kind": "double_masking", "mask_patch": 9}, r"certify\.p\.mask_patch: 9 is larger"),
        ({"kind": "double_masking", "mask_patch": 1, "patch_sizes": [2]}, "larger than mask_patch"),
        ({"kind": "rows", "band": 2, "rule": "loc", "second_rule": "loc"}, "is already the rule"),
        ({"kind": "rows", "band": 2, "stop_early": True, "delta_rule": "paper_reference"},
         "needs all votes"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_in_one_line(run, section, said):
    with pytest.raises(CasemateError, match=said) as caught:
        run(section)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["rows", "blocks", "both"])
def test_positions_touch_as_many_winning_votes_as_any(kind):
    masks = Ablations(kind=kind, image_size=(6, 6), band=2, stride=2).masks()
    votes = torch.randint(0, 2, (len(masks),), generator=torch.Generator().manual_seed(3))
    squares = patch_attack.rank_positions(votes, masks, winner=1, patch=2, num_positions=40)
    assert len(set(squares)) == len(squares)
    score = {}
    for top in range(5):
        for left in range(5):
            touched = masks[:, top : top + 2, left : left + 2].flatten(1).any(dim=1)
            score[top, left] = int((touched & (votes == 1)).sum())
    assert score[squares[0]] == max(score.values())
    assert set(squares) <= set(score)
