"""Environments: how an episode is played. No torch, no engine and no trainer: only the `Environment` port.

Start reading in `single_turn.py`, one prompt and one completion; `loading.py` is how a user's own one is found.
"""
