"""What every section of the configuration is made of."""

from __future__ import annotations

import os
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def at_home(path: str | None) -> str | None:
    """A path, or the address of user code, with a leading `~` or `~user` replaced as a shell does: one that names nobody stays."""
    return None if path is None else os.path.expanduser(path)


# Settings that may name a file or directory.
LocalPath: TypeAlias = Annotated[str, AfterValidator(at_home)]
OptionalPath: TypeAlias = Annotated[str | None, AfterValidator(at_home)]


class Section(BaseModel):
    """Base of the sections: frozen, without unknown keys, without infinity and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)  # no field means infinity: null does


def field(default: Any, text: str, **bounds: Any) -> Any:
    """A setting: its default, the sentence for `--help`, and bounds as pydantic has them (`ge`, `gt`, `le`, `lt`).

    `exclude=True`: a secret, which is written nowhere.
    """
    return Field(default, description=text, **bounds)
