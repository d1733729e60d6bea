"""From prompts to microbatches: rows of data, groups of trajectories as columns, packing. Numpy, no engine, no trainer.

Start reading in `prompts.py` (what is asked), `stash.py` and `store.py` (where groups wait until they are whole and trained) and
`packing.py` (how they become the rows of a microbatch).
"""
