"""The recipe's schema is built from the settings classes of the components.

pydantic reads those frozen dataclasses as they are. Their markers are given a meaning here:
fractions such as `8/255`, unions discriminated by `kind`, names. `Section` is for settings of
pipelines alone: which models, how many items, where the work runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache, partial
from types import NoneType
from typing import Annotated, Any, ClassVar, Self, Union, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    WrapSerializer,
    WrapValidator,
    model_validator,
)
from pydantic_core import core_schema

from components.core import user_code
from components.core.registry import KIND, Registry
from components.core.settings import (
    ByKind,
    Fractional,
    Name,
    Named,
    Problem,
    SettingError,
    Settings,
    default_of,
    hints_of,
    plain,
    unset_later_fields,
)
from components.core.user_code import UserEntry
from components.denoising.settings import DenoiserReference

FRACTION = core_schema.str_schema(pattern=r"^\s*[0-9.]+\s*/\s*[0-9.]+\s*$")


def _read_fraction(self: Fractional, source: Any, handler: Any) -> core_schema.CoreSchema:
    number = handler(source)
    either = core_schema.union_schema([number, FRACTION])  # for editors
    return core_schema.no_info_before_validator_function(
        self.read, number, json_schema_input_schema=either
    )


def _read_reference(self: DenoiserReference, source: Any, handler: Any) -> core_schema.CoreSchema:
    return core_schema.no_info_before_validator_function(self.read, handler(source))


def _read_name(self: Named, source: Any, handler: Any) -> core_schema.CoreSchema:
    return core_schema.str_schema(pattern=self.PATTERN)


def _by_kind(self: ByKind, source: Any, handler: Any) -> core_schema.CoreSchema:
    members = get_args(source)
    known = tuple(m for m in members if not issubclass(m, UserEntry))
    users_own = next((m for m in members if issubclass(m, UserEntry)), None)
    schema: core_schema.CoreSchema = handler.generate_schema(_union(known, users_own))
    return schema


def _without_unset(cls: type, source: Any, handler: Any) -> Any:
    """A `Later` key at its default is not written, as in `plain`: fingerprints do not change."""
    schema: Any = handler(source)
    schema["serialization"] = core_schema.wrap_serializer_function_ser_schema(_write_set_fields)
    return schema


def _write_set_fields(value: Any, write: SerializerFunctionWrapHandler) -> Any:
    written = write(value)
    for name in unset_later_fields(value) if isinstance(value, Settings) else ():
        written.pop(name, None)
    return written


class UsersOwn(BaseModel):
    """Code of the user, by its dotted path; its settings class tells which keys it has."""

    model_config = ConfigDict(extra="allow")

    kind: Annotated[str, Field(pattern="^python:.+:.+$")]


def _union(members: tuple[Any, ...], users_own: type[UserEntry] | None) -> Any:
    """A union of settings discriminated by `kind`, which may also name user code."""
    known: Any = Annotated[Union[members], Field(discriminator=KIND)]  # type: ignore[valid-type]  # noqa: UP007
    if users_own is None:
        return known
    read = WrapValidator(
        partial(_read_users_own, users_own), json_schema_input_type=known | UsersOwn
    )
    return Annotated[known, read, WrapSerializer(_write_users_own)]


def _read_users_own(entry: type[UserEntry], value: Any, known: ValidatorFunctionWrapHandler) -> Any:
    """Validate kind `python:...` with the user's settings class, other kinds with `known`."""
    if isinstance(value, UserEntry):
        return value
    kind = value.get(KIND) if isinstance(value, Mapping) else None
    if not user_code.is_reference(kind):
        return known(value)
    given = {key: inner for key, inner in value.items() if key != KIND}
    if not user_code.is_trusted():
        return entry(kind=str(kind), settings=given)
    pinned = user_code.pinned(str(kind), field=KIND)
    own = user_code.settings_class(pinned, field=KIND)
    or_none: Any = own | None  # an adapter of a bare dataclass does not accept a config
    adapter: TypeAdapter[Any] = TypeAdapter(or_none, config=Section.model_config)
    return entry(kind=pinned, settings=adapter.validate_python(given))


def _write_users_own(value: Any, known: SerializerFunctionWrapHandler) -> Any:
    return plain(value) if isinstance(value, UserEntry) else known(value)


# The markers are bare classes in components, which do not import pydantic.
Settings.__get_pydantic_core_schema__ = classmethod(_without_unset)  # type: ignore[attr-defined]
Fractional.__get_pydantic_core_schema__ = _read_fraction  # type: ignore[attr-defined]
DenoiserReference.__get_pydantic_core_schema__ = _read_reference  # type: ignore[attr-defined]
Named.__get_pydantic_core_schema__ = _read_name  # type: ignore[attr-defined]
ByKind.__get_pydantic_core_schema__ = _by_kind  # type: ignore[attr-defined]


class Section(BaseModel):
    """A frozen part of a recipe that refuses unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    further_keys: ClassVar[tuple[str, ...]] = ()  # handled before the section is validated
    off_keys: ClassVar[tuple[str, ...]] = ()  # whose null differs from leaving them out
    former_keys: ClassVar[Mapping[str, str]] = {}  # of earlier versions, with what to write instead

    def problems(self) -> Iterator[Problem]:
        """Violated rules between fields; evaluated only if every field is in range."""
        return iter(())

    @model_validator(mode="after")
    def _refuse_problems(self) -> Self:
        if found := list(self.problems()):
            raise SettingError(*found)
        return self


class ModelsSection(Section):
    """A section about some models of the recipe."""

    models: list[Name] | None = None
    """None: all classifiers of the recipe."""

    def problems(self) -> Iterator[Problem]:
        if self.models == []:
            yield Problem("models", "[]", "is empty; name models, or write null for all")
        if self.models and len(set(self.models)) < len(self.models):
            yield Problem("models", self.models, "names a model twice")


def union_of(registry: Registry, *, users_own: type[UserEntry] | None = None) -> Any:
    """The type of a section of any registered kind, or of user code."""
    return _union(registry.classes(), users_own)


@cache
def keys_with_off() -> frozenset[str]:
    """Keys whose null switches off something that is on by default."""
    found = {
        field.name
        for cls in _below(Settings)
        if "__dataclass_fields__" in vars(cls)
        for field in fields(cls)
        if _is_optional(hints_of(cls)[field.name])
        and default_of(cls, field.name) not in (None, MISSING)
    }
    for section in _below(Section):
        found.update(section.off_keys)
        for name, info in section.model_fields.items():
            if _is_optional(info.annotation) and info.get_default() is not None:
                found.add(name)
    return frozenset(found)


def _below(cls: Any) -> Iterator[Any]:
    for child in cls.__subclasses__():
        yield child
        yield from _below(child)


def _is_optional(hint: Any) -> bool:
    return NoneType in get_args(hint)
