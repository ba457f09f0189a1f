"""All verified results of storages or of a tracking store, ranked by what they share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.digests import digest_bytes, digest_json
from components.core.errors import CasemateError
from pipelines.api.board_results import KEY, BoardResult, rankable, results_in
from pipelines.api.found_results import LeftOut
from pipelines.api.tables import frame

if TYPE_CHECKING:
    import pandas as pd

    from components.evaluate.ranking import BoardKey, Standing

FEW_ITEMS = 100  # with fewer, as after --smoke, an interval spans 20 points and more
KINDS = ("attacked", "proven", "measured")  # in this order
PAGE, DATA = ".html", ".json"


@dataclass(frozen=True, eq=False)
class Row:
    """One model on a board, with all results that say the same of it."""

    standing: "Standing"
    own: BoardResult
    results: tuple[str, ...]  # FLOW/STEP-FINGERPRINT
    places: tuple[str, ...]

    def record(self, *, with_places: bool) -> dict[str, Any]:
        """RobustBench's fields, and ours beside."""
        from pipelines.api.robustbench import fields_of

        standing, own = self.standing, self.own
        share = standing.share
        ours = {
            "rank": standing.rank,
            "rank_at_best": standing.best,
            "rank_at_worst": standing.worst,
            "ties": list(standing.ties),
            "verdict": own.verdict,
            "label": standing.name,
            "model": own.model,
            "model_digest": own.digest,
            "kind": share.kind,
            "accuracy": {name: getattr(share, name) for name in ("value", "low", "high")},
            "num_items": share.num_items,
            "defence": own.verdicts.defence,
            "results": list(self.results),
        }
        places = {"places": list(self.places)} if with_places else {}
        return {**fields_of(own, standing.name), **ours, **places}


@dataclass(frozen=True, eq=False)
class Board:
    """Results of one figure under one protocol on the same items of one dataset."""

    key: "BoardKey"
    protocol: Mapping[str, Any]
    dataset_name: str
    num_items: int
    rows: tuple[Row, ...]

    @property
    def is_small(self) -> bool:
        """Whether it has so few items that it hardly tells models apart."""
        return self.num_items < FEW_ITEMS

    @property
    def name(self) -> str:
        """A name that stays the same from one storage to the next."""
        return f"{self.key.figure} {digest_json(list(self.key))[:8]}"

    def record(self, *, with_places: bool) -> dict[str, Any]:
        """The board as JSON values."""
        key = self.key
        return {
            "board": self.name,
            "threat": key.base,
            "budget": key.budget or None,
            "kind": key.kind,
            "dataset": self.dataset_name,
            "dataset_digest": key.dataset,
            "num_items": self.num_items,
            "items_digest": key.items,
            "small": self.is_small,
            "protocol": dict(self.protocol),
            "entries": [row.record(with_places=with_places) for row in self.rows],
        }


@dataclass(frozen=True, eq=False)
class Leaderboard:
    """All boards, and what is left out of them."""

    boards: tuple[Board, ...]
    left_out: tuple[LeftOut, ...]
    files: tuple[Path, ...] = ()

    @property
    def table(self) -> "pd.DataFrame":
        """One row per board and model."""
        about = ("board", "threat", "budget", "dataset", "dataset_digest", "small")
        rows = []
        for board in self.records()["boards"]:
            shared = {name: board[name] for name in about}
            rows += [{**entry, **shared} for entry in board["entries"]]
        return frame(rows)

    def records(self, *, with_places: bool = True) -> dict[str, Any]:
        """All of it as JSON values; places are of this machine, so files lack them."""
        return {
            "boards": [board.record(with_places=with_places) for board in self.boards],
            "left_out": [
                one._asdict() if with_places else _without_place(one) for one in self.left_out
            ],
        }


def leaderboard(
    storage: str | Path | Sequence[str | Path] = (),
    *,
    tracking: str | None = None,
    allow_suspect: bool = False,
    out: str | Path | Sequence[str | Path] = (),
    progress: Callable[[str], None] | None = None,
) -> Leaderboard:
    """Rank all finished results of storages, or of the runs in a store of MLflow.

    `storage`: storages, flows, steps or certificates, as paths or URIs; default: the storage of
    recipes that name none. Results share a board if dataset, items, threat, budget and protocol are
    the same. Every result is verified first: what is unfinished, changed, refuted, not sound or
    about an unknown dataset is in `left_out`, with the reason. Suspect attacks are shown without
    a rank unless `allow_suspect`. `out`: files to write, a page (.html) or data (.json).

    >>> from pipelines import api
    >>> import tempfile
    >>> api.leaderboard(tempfile.mkdtemp())
    Traceback (most recent call last):
    components.core.errors.CasemateError: leaderboard: ... holds no finished attack, evaluation ...
    """
    files = _files(_listed(out))
    given = [str(place) for place in _listed(storage)]
    if given and tracking is not None:
        raise CasemateError(KEY, tracking, "is given beside a storage; name one of both")
    places = given or _default_places(tracking)
    results, unfinished = results_in(places, tracking)
    found, unverified = rankable(results, progress or (lambda text: None))
    boards, repeated = boards_of(found, allow_suspect=allow_suspect)
    left_out = tuple(sorted({*unfinished, *unverified, *repeated}))
    outcome = Leaderboard(boards, left_out, files)
    if not boards:
        raise _nothing(tracking or ", ".join(places), left_out)
    for path in files:
        _write(outcome, path)
    return outcome


def _listed(given: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [given] if isinstance(given, str | Path) else list(given)


def _default_places(tracking: str | None) -> list[str]:
    from pipelines.api.storages import default_storage

    return [] if tracking is not None else [default_storage()]


def _files(given: Sequence[str | Path]) -> tuple[Path, ...]:
    paths = [Path(path).expanduser() for path in given]
    for path in paths:
        if path.suffix not in (PAGE, DATA):
            raise CasemateError("out", path, f"ends in neither {PAGE} nor {DATA}")
        if not path.parent.is_dir():
            remedy = f"cannot be written: {path.parent} is not a folder"
            raise CasemateError("out", path, remedy)
    return tuple(paths)


def _nothing(places: str, left_out: Sequence[LeftOut]) -> CasemateError:
    if not left_out:
        remedy = "holds no finished attack, evaluation or certificate"
        return CasemateError(KEY, places, remedy)
    reasons = "; ".join(f"{_short(place)}: {why}" for place, why in left_out)
    return CasemateError(KEY, places, f"has no result that counts: {reasons}")


def _without_place(one: LeftOut) -> dict[str, str]:
    """A line that names no folder of this machine."""
    short = _short(one.place)
    return {"place": short, "why": one.why.replace(one.place, short)}


def _short(place: str) -> str:
    """FLOW/STEP-FINGERPRINT of a place."""
    return "/".join(place.rstrip("/").split("/")[-2:])


# -- boards


def boards_of(
    found: Sequence[BoardResult], *, allow_suspect: bool
) -> tuple[tuple[Board, ...], list[LeftOut]]:
    """Results by board; the small boards come last."""
    from components.evaluate.ranking import board_of, protocol_of

    names = {own.verdicts.dataset: own.dataset_name for own in found if own.dataset_name}
    groups: dict[BoardKey, list[BoardResult]] = {}
    for own in found:
        groups.setdefault(board_of(own.verdicts), []).append(own)
    boards: list[Board] = []
    left_out: list[LeftOut] = []
    for key, group in groups.items():
        kept, rest = _lowest_attacks(_merged(group))
        left_out += rest
        about = group[0].verdicts
        rows = _rows(kept, allow_suspect=allow_suspect)
        name = names.get(key.dataset, "")
        boards.append(Board(key, protocol_of(about), name, len(about.item_ids), rows))
    return tuple(sorted(boards, key=_order)), left_out


def _order(board: Board) -> tuple[object, ...]:
    from components.core.settings import Fractional

    key = board.key
    budget = Fractional.read(key.budget) if key.budget else 0.0
    about = (board.dataset_name, key.dataset, KINDS.index(key.kind), key.base)
    return board.is_small, *about, -board.num_items, key.items, key.protocol, budget


def _merged(group: Sequence[BoardResult]) -> list[list[BoardResult]]:
    """Results of one model that say the same, together, the first place first."""
    found: dict[tuple[str, ...], list[BoardResult]] = {}
    for own in sorted(group, key=lambda own: (own.short_place, own.result.place)):
        found.setdefault(_identity(own), []).append(own)
    return list(found.values())


def _identity(own: BoardResult) -> tuple[str, ...]:
    """What tells results of a board apart: the model, how it votes, the doubt, every verdict."""
    verdicts = own.verdicts
    return own.digest, verdicts.defence, verdicts.doubt, digest_bytes(verdicts.correct.tobytes())


def _lowest_attacks(
    merged: Sequence[Sequence[BoardResult]],
) -> tuple[list[Sequence[BoardResult]], list[LeftOut]]:
    """Without attacks on a model that another run of the same attacks undercuts.

    Each is an upper bound of the same robust accuracy: the lowest counts, so that attacking
    again with another seed never helps a model.
    """
    kept: list[Sequence[BoardResult]] = []
    left_out: list[LeftOut] = []
    lowest: dict[str, str] = {}  # the place of each model's strongest attack
    for same in sorted(merged, key=_strength):
        own = same[0]
        if own.verdicts.kind == "attacked" and own.digest in lowest:
            why = (
                f"{own.verdicts.figure}: the same attacks on {own.model} were as strong or stronger"
            )
            why += f" in {lowest[own.digest]}"
            left_out += [LeftOut(each.result.place, why) for each in same]
            continue
        lowest[own.digest] = own.short_place
        kept.append(same)
    return kept, left_out


def _strength(same: Sequence[BoardResult]) -> tuple[object, ...]:
    own = same[0]
    return own.verdicts.share, own.verdicts.doubt, own.short_place


def _rows(kept: Sequence[Sequence[BoardResult]], *, allow_suspect: bool) -> tuple[Row, ...]:
    from components.evaluate.ranking import standings

    named = dict(zip(_labels([same[0] for same in kept]), kept, strict=True))
    verdicts = {name: same[0].verdicts for name, same in named.items()}
    doubted = {n for n, same in named.items() if same[0].verdict == "suspect"}
    unranked = set() if allow_suspect else doubted
    found = standings(
        {name: own for name, own in verdicts.items() if name not in unranked},
        {name: own for name, own in verdicts.items() if name in unranked},
    )
    return tuple(_row(standing, named[standing.name]) for standing in found)


def _row(standing: "Standing", same: Sequence[BoardResult]) -> Row:
    with_clean = next((own for own in same if own.clean is not None), same[0])
    own = replace(same[0], clean=with_clean.clean)
    short = tuple(dict.fromkeys(each.short_place for each in same))
    return Row(standing, own, short, tuple(each.result.place for each in same))


def _labels(owns: Sequence[BoardResult]) -> list[str]:
    """A name for each, as short as tells it apart from the others of its board."""
    levels = [_names(own) for own in owns]
    found = []
    for own in levels:
        unique = (name for i, name in enumerate(own) if [n[i] for n in levels].count(name) == 1)
        found.append(next(unique, own[-1]))
    return found


def _names(own: BoardResult) -> tuple[str, ...]:
    result = own.result
    plain = f"{result.flow}/{own.model}" if result.manifest else result.name
    step = f"{plain} ({result.step})" if result.manifest else plain
    return (
        plain,
        f"{plain} {own.digest[:12]}",
        step,
        f"{step} {own.digest[:12]}",
        f"{plain} ({result.name})",
        f"{plain} ({result.name}, {digest_json(_identity(own))[:8]})",
    )


# -- files


def _write(found: Leaderboard, path: Path) -> None:
    from components.core.files import atomic, json_text
    from components.report.leaderboard import leaderboard_page

    if path.suffix == DATA:
        text = json_text(found.records(with_places=False))
    else:
        text = leaderboard_page(found.records(with_places=False))
    with atomic(path) as temporary:
        temporary.write_bytes(text.encode())
