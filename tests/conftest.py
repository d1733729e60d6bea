"""What holds for the tests of every room."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """What was loaded until here stays. Frozen, it is no part of the full collections: every Runtime that opens makes one, and
    would look at all of torch and transformers each time. test_runtime_garbage has the collector as a program has it."""
    gc.collect()
    gc.freeze()
