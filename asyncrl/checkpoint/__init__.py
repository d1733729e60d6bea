"""Checkpoints: written aside, made durable, renamed into place; and what a resume needs beside the model.

Start reading in `store.py` (a directory of checkpoints); `atomic.py` is how one appears whole or not at all, `manifest.py` how
damage is noticed, `state.py` what lies in `state/`, `shards.py` what each rank of a sharded model adds.
"""
