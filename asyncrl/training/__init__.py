"""The train step: `begin`, microbatches in any split, `finish`; the gradient is that of the whole batch.

Start reading in `trainer.py` (one rank) and `sharded.py` (a model cut over the ranks); `passes.py` is one forward,
`lane_trainer.py` the same behind the port that the pumps know, `memory.py` what it will need.
"""
