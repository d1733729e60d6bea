"""What every section of the configuration is made of."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


def at_home(path: str | None) -> str | None:
    """A path, or the address of user code, with a leading `~` or `~user` replaced as a shell does: one that names nobody stays."""
    return None if path is None else os.path.expanduser(path)


def _certain(value: Any) -> Any:
    """A template takes every text for true. YAML 1.1 took these words for true or false, and YAML 1.2 takes them for text."""
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _certain(each)
    if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
        raise ValueError(f"true or false in the place of {value!r}, which is a text, and true to a template")
    return value


# Settings that may name a file or directory.
LocalPath: TypeAlias = Annotated[str, AfterValidator(at_home)]
OptionalPath: TypeAlias = Annotated[str | None, AfterValidator(at_home)]
# Values of which only their reader knows the type.
Untyped: TypeAlias = Annotated[dict[str, Any], BeforeValidator(_certain)]


class SettingsSection(BaseModel):
    """Base of the sections: frozen, without unknown keys, without infinity and NaN."""

    # No field means infinity: null does.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """One of several names may be `GRPO` or `dr-grpo`, a list may be its only item, and true is no number."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        members = (annotation, *get_args(annotation))
        if isinstance(value, bool) and bool not in members and {int, float} & {*members}:
            raise PydanticCustomError("number", "true or false is no number")
        if isinstance(value, (str, int, float, dict)) and any(get_origin(each) is tuple for each in members):
            return (value,)
        if not isinstance(value, str):
            return value
        choices = [name for each in members if get_origin(each) is Literal for name in get_args(each)]
        spelled = value.lower().replace("-", "_")
        return next((name for name in choices if isinstance(name, str) and name.lower() == spelled), value)


def field(default: Any, text: str, **bounds: Any) -> Any:
    """A setting: its default, the sentence for `--help`, and bounds as pydantic has them (`ge`, `gt`, `le`, `lt`).

    `exclude=True`: a secret, which is written nowhere.
    """
    return Field(default, description=text, **bounds)
