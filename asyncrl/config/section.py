"""What every section of the configuration is made of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of the sections: frozen, without unknown keys, without infinity and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)  # no field means infinity: null does


def field(default: Any, text: str, **bounds: Any) -> Any:
    """A setting: its default, the sentence for `--help`, and bounds as pydantic has them (`ge`, `gt`, `le`, `lt`).

    `exclude=True`: a secret, which is written nowhere.
    """
    return Field(default, description=text, **bounds)
