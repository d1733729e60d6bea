"""What every section of the configuration is made of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)  # no field means infinity: null does


def field(default: Any, text: str, **bounds: Any) -> Any:
    return Field(default, description=text, **bounds)
