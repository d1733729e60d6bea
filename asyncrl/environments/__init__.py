"""Environments play the episodes of a run. An environment reaches the engine only through the argument `generate` of its `run`.

Start reading in `single_turn.py`, with one completion per prompt. `loading.py` loads the environment that the user configured.
"""
