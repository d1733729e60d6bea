"""Record schema v1: scored trajectories as bytes, for any process that has numpy."""

from __future__ import annotations
