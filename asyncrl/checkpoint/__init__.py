"""Checkpoints of a run: the model, and the state that a resume needs. A save writes a temporary directory and then renames it.

Start reading in `store.py`, which saves, loads and removes checkpoints. `atomic.py` has the rename, `manifest.py` finds damaged
files, `state.py` reads and writes files of `state/`, and `shards.py` writes and joins the rows of each rank of a sharded model.
"""
