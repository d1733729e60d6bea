"""Environments play the episodes of a run. Environments know the engine only as the function `generate` of the `Environment` port.

Start reading in `single_turn.py`, with one completion per prompt. `loading.py` finds the environment of a user.
"""
