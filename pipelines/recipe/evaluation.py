"""The gate's checks of the evaluate section; files are read only where they are on this machine."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from components.core.errors import CasemateError
from components.core.problems import Problems
from components.data.sources import find_source, open_source
from components.data.sources.info import check_options
from components.data.sources.registry import file_options
from components.evaluate.settings import (
    PREPARED,
    CorruptionSuiteSettings,
    ShiftSuiteSettings,
)
from pipelines.recipe.facts import Facts, source_info, spec_of
from pipelines.recipe.schema.recipe import Recipe

IMAGENET_CLASSES = 1000
IMAGENET = "imagenet_"  # sources of shifts that have the labels of ImageNet
SMALLEST_SIDE = 8  # of images that can be corrupted
WATER = (1, 2, 3)  # severities of spatter that need OpenCV


def check_files(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Names, options and layouts of the datasets and models that the suites read."""
    section = recipe.evaluate
    if section is None:
        return
    if section.corruptions:
        _check_corruption_files(section.corruptions, problems)
    for name, shift in section.shifts.items():
        _check_shift_files(f"evaluate.shifts.{name}", shift, problems)
    if section.shape_bias and Path(section.shape_bias.path).expanduser().is_dir():
        from components.evaluate.shape_bias import list_stimuli  # imports torch

        _try(problems, "evaluate.shape_bias.path", list_stimuli, section.shape_bias.path)
    for name in section.transfer.models if section.transfer else ():
        if name in recipe.model_names():
            key = f"evaluate.transfer.models.{name}"
            problems.add(key, "", "has the name of a model of this recipe; choose another")


def check_images(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Images and classes that a suite cannot use."""
    section = recipe.evaluate
    if section is None:
        return
    if section.corruptions:
        _check_corrupted_images(section.corruptions, facts, problems)
    if section.shape_bias and facts.num_classes not in (None, IMAGENET_CLASSES):
        remedy = f"classes in the data; the suite needs the {IMAGENET_CLASSES} of ImageNet"
        problems.add("evaluate.shape_bias", facts.num_classes, remedy)
    for name, shift in section.shifts.items():
        _check_classes(f"evaluate.shifts.{name}", shift, recipe, facts, problems)
    for name, folder in section.transfer.models.items() if section.transfer else ():
        theirs = (spec_of(Path(folder).expanduser()) or {}).get("num_classes")
        if theirs and facts.num_classes and theirs != facts.num_classes:
            key, remedy = f"evaluate.transfer.models.{name}", f"has {theirs} classes, the data have"
            problems.add(key, folder, f"{remedy} {facts.num_classes}")
    grid = section.spatial.grid if section.spatial else None
    if grid and facts.side and grid.max_shift >= facts.side:
        remedy = f"moves the whole image out of its frame (side {facts.side})"
        problems.add("evaluate.spatial.grid.max_shift", f"{grid.max_shift:g}", remedy)


def evaluation_paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(key, path) of every dataset, texture, stimulus and model folder of the section."""
    section = recipe.evaluate
    if section is None:
        return
    for name in ("path", "textures"):
        if path := getattr(section.corruptions, name, None):
            yield f"evaluate.corruptions.{name}", path
    for name, shift in section.shifts.items():
        key = f"evaluate.shifts.{name}"
        if shift.path is not None:
            yield f"{key}.path", shift.path
        files = {} if shift.source == PREPARED else file_options(shift.source, shift.options)
        yield from ((f"{key}.options.{option}", path) for option, path in files.items())
    if section.shape_bias:
        yield "evaluate.shape_bias.path", section.shape_bias.path
    for name, folder in section.transfer.models.items() if section.transfer else ():
        yield f"evaluate.transfer.models.{name}", folder


def _check_corruption_files(settings: CorruptionSuiteSettings, problems: Problems) -> None:
    if settings.textures and Path(settings.textures).expanduser().is_dir():
        from components.data.corruptions.textures import texture_files

        _try(problems, "evaluate.corruptions.textures", texture_files, settings.textures)
    if settings.path is None or not Path(settings.path).expanduser().is_dir():
        return
    from components.data.corruptions.stored import check_arrays, in_words, stored_variants

    root = Path(settings.path).expanduser()
    try:
        present = stored_variants(settings.source, root)
        check_arrays(settings.source, root)
    except CasemateError as error:
        problems.add("evaluate.corruptions.path", error.value, error.remedy)
        return
    wanted = () if isinstance(settings.names, str) else settings.variants()
    if missing := [variant for variant in wanted if variant not in present]:
        problems.add("evaluate.corruptions.path", settings.path, f"lacks {in_words(missing)}")


def _check_shift_files(key: str, shift: ShiftSuiteSettings, problems: Problems) -> None:
    if shift.source != PREPARED:
        with problems.at(key):
            info = find_source(shift.source)
            check_options(info, shift.options)
        if not shift.source.startswith(IMAGENET):
            return
    path = Path(shift.path or "").expanduser()
    if path.is_dir():
        _try(problems, f"{key}.path", _classes_of, shift)


def _classes_of(shift: ShiftSuiteSettings) -> Sequence[str]:
    """The classes of a shifted dataset."""
    if shift.source != PREPARED:
        return open_source(shift.source, path=shift.path, options=shift.options).classes
    from components.data.stream import read_document

    document = read_document(Path(shift.path or "").expanduser() / "dataset.json")
    return list(document["classes"])


def _check_corrupted_images(
    settings: CorruptionSuiteSettings, facts: Facts, problems: Problems
) -> None:
    if settings.source != "generate":
        theirs = find_source(settings.source).num_classes
        if theirs and facts.num_classes and theirs != facts.num_classes:
            remedy = f"has {theirs} classes, the data have {facts.num_classes}"
            problems.add("evaluate.corruptions.source", settings.source, remedy)
        elif facts.classes is not None:
            _check_names(settings.source, facts.classes, problems)
        return
    if facts.side and facts.side < SMALLEST_SIDE:
        remedy = f"pixels are too few to corrupt; at least {SMALLEST_SIDE}"
        problems.add("evaluate.corruptions", facts.side, remedy)
    water = "spatter" in settings.chosen_names() and set(WATER) & set(settings.severities)
    if water and find_spec("cv2") is None:
        remedy = "needs OpenCV: pip install 'casemate[spatter]', or leave it out of names"
        problems.add("evaluate.corruptions.names", "spatter", remedy)


def _check_names(source: str, classes: Sequence[str], problems: Problems) -> None:
    """Refuse corrupted images of classes that the data do not have."""
    from components.data.corruptions.stored import labels_among

    try:
        labels_among(source, classes)
    except CasemateError as error:
        remedy = f"has other classes than the data: {error.value} {error.remedy}"
        problems.add("evaluate.corruptions.source", source, remedy)


def _check_classes(
    key: str, shift: ShiftSuiteSettings, recipe: Recipe, facts: Facts, problems: Problems
) -> None:
    """Classes of a shifted dataset that are not those of the models."""
    listed = source_info(recipe.data).num_classes
    if shift.source.startswith(IMAGENET) and listed not in (None, IMAGENET_CLASSES):
        remedy = f"has the classes of ImageNet, {recipe.data.source} has {listed} others"
        problems.add(f"{key}.source", shift.source, remedy)
        return
    path = Path(shift.path or "").expanduser()
    readable = shift.source.startswith(IMAGENET) or shift.source == PREPARED
    if facts.classes is None or not readable or not path.is_dir():
        return
    if shift.source == PREPARED:
        _check_size(f"{key}.path", shift, facts, problems)
    from components.evaluate.shifts import class_map_of  # imports torch

    try:
        class_map_of(
            shift.source,
            _classes_of(shift),
            num_classes=len(facts.classes),
            model_classes=facts.classes,
            class_map=shift.class_map,
        )
    except CasemateError as error:
        inner = error.key.removeprefix("shifts").removeprefix(".")
        problems.add(".".join(filter(None, [key, inner])), error.value, error.remedy)


def _check_size(key: str, shift: ShiftSuiteSettings, facts: Facts, problems: Problems) -> None:
    from components.data.stream import read_document

    document = read_document(Path(shift.path or "").expanduser() / "dataset.json")
    found = [document["channels"], document["height"], document["width"]]
    wanted = [facts.channels, facts.height, facts.width]
    if found != wanted:
        problems.add(key, shift.path, other_size(found, wanted))


def other_size(found: Sequence[object], wanted: Sequence[object]) -> str:
    """The remedy for prepared images of another size than the models take."""
    sizes = ["x".join(map(str, shape)) for shape in (found, wanted)]
    return f"has images of {sizes[0]}, the models take {sizes[1]}; prepare it at that size"


def _try(problems: Problems, key: str, check: object, value: object) -> None:
    """Add the error that `check(value)` raises, under `key`."""
    assert callable(check)
    try:
        check(Path(value).expanduser() if isinstance(value, str) else value)
    except CasemateError as error:
        problems.add(key, error.value, error.remedy)
