"""Checkpoints of a run: the model, and the state that a resume needs. A checkpoint appears under its name in one rename.

Start reading in `store.py`, which saves, loads and removes checkpoints. `atomic.py` has the rename, `manifest.py` finds damaged
files, `state.py` reads and writes the files in `state/`, and `shards.py` handles the part of each rank of a sharded model.
"""
