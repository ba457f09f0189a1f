"""Verified figures of results, grouped by what they share and ranked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from components.core.digests import digest_bytes, digest_json
from components.core.settings import Fractional
from components.evaluate.ranking import BoardKey, Standing, board_of, protocol_of, standings
from pipelines.api.board_results import BoardResult
from pipelines.api.found_results import LeftOut
from pipelines.api.robustbench import fields_of

KINDS = ("attacked", "proven", "measured")  # in this order
FEW_ITEMS = 100  # with fewer, as after --smoke, an interval spans up to 20 points


@dataclass(frozen=True, eq=False)
class Row:
    """One model on a board, with all results that say the same of it."""

    standing: Standing
    own: BoardResult
    results: tuple[str, ...]  # FLOW/STEP-FINGERPRINT
    places: tuple[str, ...]

    def record(self, *, with_places: bool) -> dict[str, Any]:
        """RobustBench's fields, and ours beside."""
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

    key: BoardKey
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


def boards_of(
    found: Sequence[BoardResult], *, allow_suspect: bool
) -> tuple[tuple[Board, ...], list[LeftOut]]:
    """Results by board; the small boards come last."""
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
    named = dict(zip(_labels([same[0] for same in kept]), kept, strict=True))
    verdicts = {name: same[0].verdicts for name, same in named.items()}
    doubted = {n for n, same in named.items() if same[0].verdict == "suspect"}
    unranked = set() if allow_suspect else doubted
    found = standings(
        {name: own for name, own in verdicts.items() if name not in unranked},
        {name: own for name, own in verdicts.items() if name in unranked},
    )
    return tuple(_row(standing, named[standing.name]) for standing in found)


def _row(standing: Standing, same: Sequence[BoardResult]) -> Row:
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
