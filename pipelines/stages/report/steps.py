"""Plan of the report stage: one step, after all others."""

from pathlib import Path

from components.core.digests import digest_file
from components.core.errors import CasemateError
from pipelines.recipe.schema.place import ReportSection
from pipelines.stages.registry import Planning, Step


def steps(planning: Planning) -> list[Step]:
    """The report of all earlier steps."""
    recipe = planning.recipe
    identity = {"report": _report_identity(recipe.report), "name": recipe.name}
    return [Step("report", "", tuple(step.name for step in planning.earlier), identity)]


def _report_identity(section: ReportSection) -> dict[str, object]:
    """The report section; tables to compare with count by their content, not by their path."""
    values = section.model_dump(mode="json")
    for name, entry in values["compare"].items():
        path = Path(entry["path"]).expanduser()
        if not path.is_file():
            remedy = "is not a file; casemate export-tsv writes such tables"
            raise CasemateError(f"report.compare.{name}.path", path, remedy)
        entry["path"] = digest_file(path)
    if not values["compare"]:  # reports made before this key existed keep their fingerprints
        del values["compare"]
    return values
