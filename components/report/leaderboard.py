"""The page of `casemate leaderboard`: a table per board, sorted and filtered where scripts run."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from components.evaluate.comparison import SIGNIFICANT
from components.report.content import (
    Accuracy,
    Cell,
    Chapter,
    Column,
    Content,
    Fact,
    Flag,
    Table,
)
from components.report.page import rendered
from components.report.wording import settings_text

TEMPLATE = "leaderboard.html.j2"
MOST_TIES = 4  # that are named in a cell
Record = Mapping[str, Any]  # a board, or an entry, as `Leaderboard.records` gives them

KINDS = {
    "measured": "measured without an adversary; 95% intervals",
    "attacked": "accuracy after the attacks: an upper bound, a stronger attack may lower it; "
    "95% intervals",
    "proven": "certified accuracy: a lower bound that holds for every attack within the budget; "
    "rounded down",
}
RULES = (
    Fact("Board", "Results with equal dataset, items, threat, budget and protocol. Nothing else "
         "is ranked against each other."),
    Fact("Rank", "1 and the number of models with a larger share."),
    Fact("Interval", "95%, of Wilson (1927); ends are rounded outwards."),
    Fact("Range", "Ranks that are possible if only significant differences count: exact paired "
         f"tests on the same items (McNemar; of means Student's t) at {SIGNIFICANT:g}, adjusted "
         "for all pairs of the board (Holm)."),
    Fact("Tie", "The difference is not significant. A tie does not show that two models are "
         "equal."),
    Fact("Suspect", "A sanity check of the attack failed, so it may overstate robustness: without "
         "a rank, unless the board was made with --allow-suspect. Unchecked: no sanity checks."),
    Fact("One attack counts", "Of several runs of the same attacks on a model, the strongest."),
    Fact("Verified", "Files are those of their manifests, shares follow from rows per item, "
         "certificates from their votes. All else is left out, with the reason."),
)  # fmt: skip


def leaderboard_page(document: Record) -> str:
    """The page of a leaderboard as HTML, from its JSON document; only its script sorts."""
    return rendered(TEMPLATE, leaderboard_content(document))


def leaderboard_content(document: Record) -> Content:
    """What the page shows."""
    boards, left_out = document["boards"], document["left_out"]
    entries = [entry for board in boards for entry in board["entries"]]
    models = {entry["model_digest"] for entry in entries}
    facts = [Fact("Models", str(len(models))), Fact("Boards", str(len(boards)))]
    facts += [Fact("Results", str(len(entries))), Fact("Left out", str(len(left_out)))]
    chapters = [_overview(boards), *(_chapter(group) for group in _groups(boards))]
    chapters.append(Chapter("rules", "How results are ranked", facts=RULES))
    if left_out:
        chapters.append(_left_out(left_out))
    return Content(
        "Leaderboard",
        "Verified results only, ranked on the same items under the same protocol",
        tuple(facts),
        Table("headline", (Column("Model"),), ()),  # the first chapter has all boards
        (),
        tuple(chapters),
        "",
        _provenance(boards),
    )


def _groups(boards: Sequence[Record]) -> list[list[Record]]:
    """Boards that differ in their budget alone."""
    shared = ("dataset_digest", "items_digest", "threat", "protocol")
    found: dict[str, list[Record]] = {}
    for board in boards:
        found.setdefault(repr([board[name] for name in shared]), []).append(board)
    return list(found.values())


# -- words


def _threat(board: Record) -> str:
    """A figure's base as a title: `Certified accuracy, l2`."""
    first, _, rest = str(board["threat"]).partition(".")
    titles = {
        "clean": "Clean accuracy",
        "robust": "Robust accuracy",
        "certified": "Certified accuracy",
        "smoothed": "Clean accuracy of the vote",
    }
    title = titles.get(first, first.replace("_", " ").capitalize())
    return f"{title}, {rest}" if rest else title


def _budget(board: Record) -> str:
    if board["budget"] is None:
        return ""
    if ".patch" in board["threat"]:
        return f"patch side {board['budget']} px"
    if board["kind"] == "proven":
        return f"radius {board['budget']}"
    return f"eps {board['budget']}" if board["kind"] == "attacked" else f"at {board['budget']}"


def _dataset(board: Record) -> str:
    return board["dataset"] or f"dataset {board['dataset_digest'][:12]}"


# -- chapters


def _overview(boards: Sequence[Record]) -> Chapter:
    """Every board in a row, with the models that nothing is significantly better than."""
    columns = (
        *(Column("Figure"), Column("Budget"), Column("First, and ties with it", "note")),
        *(Column("Accuracy", "number", "of the first, %"), Column("Dataset")),
        *(Column("Items", "number"), Column("Results", "number")),
    )
    rows: list[tuple[Cell, ...]] = []
    for board in boards:
        ranked = [entry for entry in board["entries"] if entry["rank"] is not None]
        leaders = [e["label"] for e in ranked if e["rank"] == 1 or e["rank_at_best"] == 1]
        share = _accuracy(ranked[0]).percent(board["kind"])[:-1] if ranked else None
        rows.append(
            (
                *(_threat(board), _budget(board), _named(leaders) or "no result counts", share),
                *(_dataset(board), board["num_items"], len(board["entries"])),
            )
        )
    table = Table("boards", columns, tuple(rows), sortable=True)
    return Chapter("boards", "Boards", tables=(table,))


def _chapter(boards: Sequence[Record]) -> Chapter:
    """The boards of one figure, one table per budget."""
    board = boards[0]
    is_small, is_alone = board["small"], len(boards) == 1
    title = ", ".join(filter(None, [_threat(board), _budget(board) if is_alone else ""]))
    size = f"{board['num_items']:,} items"
    few = " Few items, which hardly tell models apart." if is_small else ""
    facts = [
        Fact("Dataset digest", board["dataset_digest"], code=True),
        Fact("Items digest", board["items_digest"], code=True),
        *(Fact(n.capitalize(), words) for n, words in protocol_words(board["protocol"]).items()),
    ]
    return Chapter(
        f"board-{board['board'].rpartition(' ')[2]}",
        f"{title}: {_dataset(board)}, {size}",
        f"{KINDS[board['kind']].capitalize()}.{few}",
        tables=tuple(_table(one, is_alone=is_alone) for one in boards),
        facts=tuple(facts),
        filters={
            "dataset": _dataset(board),
            "figure": _threat(board),
            "kind": board["kind"],
            "items": "fewer than 100" if is_small else "100 and more",
        },
    )


def protocol_words(protocol: Record) -> dict[str, str]:
    """The settings that results of a board share, in words."""
    return {name.replace("_", " "): _setting(value) for name, value in protocol.items()}


def _setting(value: object) -> str:
    """A setting of the protocol in words: of an attack its kind, then what is set."""
    if isinstance(value, Mapping):
        told = {n: v for n, v in value.items() if v is not None and n != "kind"}
        words = settings_text(told)
        return f"{value['kind']} ({words})" if "kind" in value else words
    if isinstance(value, list):
        return "; ".join(_setting(one) for one in value) or "none"
    return str(value)


def _table(board: Record, *, is_alone: bool) -> Table:
    entries, kind = board["entries"], board["kind"]
    columns = [Column("Rank", "number"), Column("Model"), Column("Accuracy", kind, kind)]
    rows: list[list[Cell]] = [[_rank(e), e["label"], _accuracy(e)] for e in entries]
    is_attacked, is_clean = kind == "attacked", kind == "measured"
    further: list[tuple[Column, list[Cell]]] = [
        (Column("Clean", "number", "%"), [not is_clean and e["clean_acc"] for e in entries]),
        (Column("Range"), [_range(e) for e in entries]),
        (Column("Verdict"), [_flag(e) if is_attacked else "" for e in entries]),
        (Column("Ties with", "note"), [_named(e["ties"]) for e in entries]),
        (Column("Reasons", "note", "for doubt"), [_reasons(e) for e in entries]),
        (Column("Votes"), [e["defence"] for e in entries]),
        (Column("Architecture", "note"), [e["architecture"] for e in entries]),
        (Column("Model digest"), [e["model_digest"][:12] for e in entries]),
        (Column("Results", "note"), [", ".join(e["results"]) for e in entries]),
    ]
    for column, cells in further:
        if any(cells):
            columns.append(column)
            for row, cell in zip(rows, cells, strict=True):
                row.append(cell or "")
    name = re.sub(r"[^\w.-]+", "-", board["board"])
    title = "" if is_alone else _budget(board)
    shown = title[:1].upper() + title[1:]
    return Table(name, tuple(columns), tuple(map(tuple, rows)), title=shown, sortable=True)


def _accuracy(entry: Record) -> Accuracy:
    share = entry["accuracy"]
    return Accuracy(share["value"], share["low"], share["high"], entry["num_items"])


def _range(entry: Record) -> str:
    best, worst = entry["rank_at_best"], entry["rank_at_worst"]
    if best is None:
        return ""
    return str(best) if best == worst else f"{best} to {worst}"


def _named(names: Sequence[str]) -> str:
    more = len(names) - MOST_TIES
    return ", ".join(names[:MOST_TIES]) + (f" and {more} more" if more > 0 else "")


def _rank(entry: Record) -> Cell:
    """The rank; what has none shows why in the first column, which a phone never cuts off."""
    return _flag(entry) if entry["rank"] is None else int(entry["rank"])


def _flag(entry: Record) -> Flag:
    return Flag(entry["verdict"], is_alarm=entry["verdict"] == "suspect")


def _reasons(entry: Record) -> str:
    return str(entry["footnote"]).partition(": ")[2]


def _left_out(left_out: Sequence[Record]) -> Chapter:
    columns = (Column("Result"), Column("Why", "note"))
    rows = tuple((one["place"], one["why"]) for one in left_out)
    intro = "None of these is on a board."
    return Chapter("left-out", "Left out", intro, tables=(Table("left_out", columns, rows),))


def _provenance(boards: Sequence[Record]) -> tuple[Fact, ...]:
    """Datasets by name, with their digests."""
    names = {board["dataset_digest"]: _dataset(board) for board in boards}
    return tuple(Fact(name, digest, code=True) for digest, name in names.items())
