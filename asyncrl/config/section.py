"""What every section of the configuration is made of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from .text import Word


def at_home(path: str | None) -> str | None:
    """A path, or the address of user code, with a leading `~` or `~user` replaced as a shell does: one that names nobody stays."""
    return None if path is None else os.path.expanduser(path)


# Settings that may name a file or directory.
LocalPath: TypeAlias = Annotated[str, AfterValidator(at_home)]
OptionalPath: TypeAlias = Annotated[str | None, AfterValidator(at_home)]


def _without_words(value: Any) -> Any:
    """`no` without quotes is false: templates take every text for true."""
    if isinstance(value, Mapping):
        return {str(key) if isinstance(key, Word) else key: _without_words(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_words(each) for each in value]
    return value.meaning if isinstance(value, Word) else value


# Values of which only their reader knows the type.
Untyped: TypeAlias = Annotated[dict[str, Any], BeforeValidator(_without_words)]


class Section(BaseModel):
    """Base of the sections: frozen, without unknown keys, without infinity and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)  # no field means infinity: null does

    @model_validator(mode="before")
    @classmethod
    def _names_without_case(cls, value: Any) -> Any:
        """Where one of several names is asked for, `GRPO` and `dr-grpo` are names, too."""
        if not isinstance(value, Mapping):
            return value
        return {key: _as_choice(each, cls.model_fields.get(key)) for key, each in value.items()}


def _as_choice(value: Any, knob: FieldInfo | None) -> Any:
    if knob is None or not isinstance(value, str):
        return value
    members = (knob.annotation, *get_args(knob.annotation))
    choices = [name for member in members if get_origin(member) is Literal for name in get_args(member)]
    spelled = value.lower().replace("-", "_")
    return next((name for name in choices if isinstance(name, str) and name.lower() == spelled), value)


def field(default: Any, text: str, **bounds: Any) -> Any:
    """A setting: its default, the sentence for `--help`, and bounds as pydantic has them (`ge`, `gt`, `le`, `lt`).

    `exclude=True`: a secret, which is written nowhere.
    """
    return Field(default, description=text, **bounds)
