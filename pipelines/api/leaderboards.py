"""All verified results of storages or of a tracking store, ranked by what they share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from pipelines.api.found_results import LeftOut
from pipelines.api.outputs import output_file
from pipelines.api.tables import frame

if TYPE_CHECKING:
    import pandas as pd

    from pipelines.api.boards import Board

KEY = "leaderboard"  # in errors
PAGE, DATA = ".html", ".json"


@dataclass(frozen=True, eq=False)
class Leaderboard:
    """All boards, and what is left out of them."""

    boards: "tuple[Board, ...]"
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
    from pipelines.api.board_results import rankable, results_in
    from pipelines.api.boards import boards_of

    files = tuple(output_file(path, (PAGE, DATA)) for path in _listed(out))
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
