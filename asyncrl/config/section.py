"""The base class of the sections of the configuration, `field` for one setting, and types of settings with special values."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


def expand_home(path: str | None) -> str | None:
    """Replaces a leading `~` or `~user` of a path, or of `file.py:function`, as a shell does. An unknown `~user` is kept."""
    return None if path is None else os.path.expanduser(path)


def _refuse_yes_and_no(value: Any) -> Any:
    """Refuses yes, no, on and off, which YAML 1.2 reads as strings: a chat template would read "no" as true."""
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _refuse_yes_and_no(item)
    if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
        raise ValueError(f"true or false instead of {value!r}: a template reads every string as true, even {value!r}")
    return value


def _inner_types(annotation: Any) -> list[Any]:
    """The annotation and the types of its items, keys and values, at any depth."""
    return [annotation, *(kind for argument in get_args(annotation) for kind in _inner_types(argument))]


# Settings that may name a file or directory.
LocalPath: TypeAlias = Annotated[str, AfterValidator(expand_home)]
OptionalPath: TypeAlias = Annotated[str | None, AfterValidator(expand_home)]
# Keyword arguments that are passed to code outside of asyncrl, such as a chat template: asyncrl does not know their types.
Untyped: TypeAlias = Annotated[dict[str, Any], BeforeValidator(_refuse_yes_and_no)]


class SettingsSection(BaseModel):
    """Base of the sections. Sections are frozen, and refuse unknown keys, infinity and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _normalise(cls, value: Any, info: ValidationInfo) -> Any:
        """Accepts a choice in another spelling (`ASYNC`, `one-off`), and an item in place of a list. Refuses a bool as a number."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        types = (annotation, *get_args(annotation))
        inner = _inner_types(annotation)
        items = [*value.values()] if isinstance(value, dict) else value
        for item in items if isinstance(items, (list, tuple)) else [items]:
            if isinstance(item, bool) and bool not in inner and (int in inner or float in inner):
                raise PydanticCustomError("number" if item is value else "value_error", "a number, not true or false")
            if type(item) is int and item.bit_length() > 64 and int in inner:
                raise ValueError("an integer of at most 64 bits")
        if type(value) is int and int in types:
            return value
        if isinstance(value, (str, int, float, dict)) and any(get_origin(kind) is tuple for kind in types):
            return (value,)
        if not isinstance(value, str):
            return value
        choices = [choice for kind in types if get_origin(kind) is Literal for choice in get_args(kind)]
        spelling = value.lower().replace("-", "_")
        return next((choice for choice in choices if isinstance(choice, str) and choice.lower() == spelling), value)


def field(default: Any, text: str, **bounds: Any) -> Any:
    """Declares a setting: its default, its description for `--help`, and pydantic's bounds (`ge`, `gt`, `le`, `lt`).

    `exclude=True` marks a secret: no file, log, error or diff contains its value.
    """
    # `writeOnly` is JSON Schema's word for a secret. ConfigField reads it.
    if bounds.get("exclude"):
        bounds["json_schema_extra"] = {"writeOnly": True}
    return Field(default, description=text, **bounds)
