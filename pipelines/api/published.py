"""The tables and figures of the papers, with the recipes that repeat them: cost and status."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from pipelines.api.runs import DTYPE, estimate, load_recipe

if TYPE_CHECKING:
    from pipelines.recipe.schema.recipe import Recipe

ACCELERATOR = "A100"  # of the costs
WORDS = {"prepare": "data", "train": "training", "tune": "trials", "attack": "attacks"}
Row = dict[str, Any]


def published(
    *,
    paper: str | None = None,
    storage: str | Path | None = None,
    accelerator: str = ACCELERATOR,
    costs: bool = True,
) -> list[Row]:
    """Every table and figure of the papers: its recipes with cost and status, or why it has none.

    `paper` is the name of a folder of recipes. `storage` is searched for finished flows. Costs are
    hours on one accelerator, those of `estimate`.

    >>> from pipelines import api
    >>> rows = api.published(paper="smoothed-vit", costs=False)
    >>> rows[0]["item"], rows[0]["recipes"][0]["recipe"]
    ('Table 1', 'svit-in1k-col19-r18')
    """
    from pipelines.recipe.published import papers
    from pipelines.recipe.published import published as catalogue
    from pipelines.runtime import progress

    titles = papers()
    if paper is not None and paper not in titles:
        raise CasemateError("paper", paper, f"is unknown; choose {', '.join(titles)}")
    if costs:
        _check_accelerator(accelerator)
        progress.say("estimating costs takes a minute; --no-costs leaves them out")
    wanted = [key for key in titles if paper in (None, key)]
    finished = {} if storage is None else _finished_reports(storage)
    known: dict[str, Row] = {}

    def about(name: str) -> Row:
        if name not in known:
            known[name] = _recipe_row(name, finished, storage, accelerator if costs else None)
        return known[name]

    rows: list[Row] = []
    for entry in catalogue():
        if entry.item.paper in wanted:
            names = (*entry.recipes, *entry.miniatures)
            rows.append(
                {
                    "paper": entry.item.paper,
                    "item": str(entry.item),
                    "title": entry.title,
                    "recipes": [about(name) for name in names],
                    "status": _item_status(entry.recipes, entry.missing),
                    "note": entry.missing or entry.partly,
                }
            )
    return rows + [
        row for key in (*wanted, *([None] * (paper is None))) for row in _rest(key, about)
    ]


def _check_accelerator(name: str) -> None:
    from components.certify.estimate import ACCELERATORS

    if name not in ACCELERATORS:
        raise CasemateError("accelerator", name, f"is unknown; choose {', '.join(ACCELERATORS)}")


def _rest(paper: str | None, about: Callable[[str], Row]) -> list[Row]:
    """Recipes that belong to no table or figure."""
    from pipelines.recipe.published import beyond

    names = beyond(paper)
    if not names:
        return []
    title = "Recipes of no table or figure"
    recipes = [about(name) for name in names]
    place = {"paper": paper or "", "item": "", "title": title}
    return [{**place, "recipes": recipes, "status": "further", "note": ""}]


def _item_status(recipes: tuple[str, ...], missing: str) -> str:
    return "covered" if recipes and not missing else "not covered"


def _recipe_row(
    name: str, finished: Mapping[str, set[str]], storage: str | Path | None, where: str | None
) -> Row:
    from pipelines.recipe.load import headline
    from pipelines.recipe.published import is_miniature

    recipe = load_recipe(name)
    needs = _needs(recipe)
    row: Row = {
        "recipe": name,
        "what": headline(name),
        "miniature": is_miniature(name),
        "needs": needs,
        "downloads": _downloads(recipe),
        "status": _status(recipe, needs, finished, storage),
    }
    return {**row, "cost": _cost(recipe, where)} if where else row


def _needs(recipe: "Recipe") -> dict[str, list[str]]:
    """Files of data and weights that are not here, as the recipe names them."""
    from pipelines.recipe.paths import named_paths

    found: dict[str, list[str]] = {"data": [], "weights": []}
    for named in named_paths(recipe):
        if not named.made and named.relative and not Path(named.path).exists():
            kind = "weights" if named.path.startswith("weights/") else "data"
            found[kind].append(named.path)
    return {kind: sorted(set(paths)) for kind, paths in found.items() if paths}


def _downloads(recipe: "Recipe") -> bool:
    """Whether training starts from weights that timm downloads."""
    from components.models.settings import TIMM

    return any(section.pretrained == TIMM for _, section in recipe.model_sections())


def _status(
    recipe: "Recipe",
    needs: Mapping[str, list[str]],
    finished: Mapping[str, set[str]],
    storage: str | Path | None,
) -> str:
    if prints := finished.get(recipe.name):
        if _report_print(recipe, storage) in prints:
            return f"run: results in {storage}"
        return f"run with other settings: results in {storage}"
    if needs:
        listed = "; ".join(f"{kind}: {', '.join(paths)}" for kind, paths in needs.items())
        return f"needs {listed}"
    return "ready"


def _finished_reports(storage: str | Path) -> dict[str, set[str]]:
    """Fingerprints of the finished reports of a storage, by recipe; a report ends a flow."""
    from pipelines.runtime.inventory import existing_storage, inventory

    found: dict[str, set[str]] = {}
    for step, manifest in inventory(existing_storage(storage)).finished():
        if manifest.step == "report":
            found.setdefault(step.recipe, set()).add(manifest.fingerprint)
    return found


def _report_print(recipe: "Recipe", storage: str | Path | None) -> str | None:
    """The fingerprint of this recipe's report; None if files that decide it are not here."""
    from pipelines.flow.plan import plan

    try:
        steps = plan(recipe, str(storage))
    except (CasemateError, OSError):
        return None
    return next((step.fingerprint for step in steps if step.step.stage == "report"), None)


def _cost(recipe: "Recipe", accelerator: str) -> Row:
    """Hours of all steps, and what cannot be estimated here with the reason."""
    cost: Row = {"accelerator": accelerator, "precision": DTYPE, "not_estimated": []}
    open_: Row = {**cost, "hours_low": None, "hours_high": None}
    try:
        rows = estimate(recipe, accelerators=[accelerator], dtype=DTYPE)
    except CasemateError as error:
        key, remedy = error.key.rpartition(": ")[2], error.remedy.partition(":")[0]
        return {**open_, "why": f"{key} {error.value} {remedy}"}
    unknown = {row["step"].partition(".")[0]: row["unknown"] for row in rows if "unknown" in row}
    unknown.pop("prepare", None)  # takes no accelerator
    left_out = [WORDS.get(stage, stage) for stage in unknown]
    hours = [row["hours"][0] for row in rows if row["hours"]]
    low, high = (sum(hour[end] for hour in hours) for end in ("low", "high"))
    if high == 0:
        why = next(iter(unknown.values()), "").partition("; ")[0]
        return {**open_, "why": why.replace(": ", " ", 1)}
    return {**cost, "hours_low": low, "hours_high": high, "not_estimated": left_out, "why": ""}
