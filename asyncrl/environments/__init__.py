"""Environments: how an episode is played. No torch, no engine and no trainer: only the `Environment` port."""
