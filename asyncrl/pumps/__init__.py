"""The pumps: coroutines that move groups one stage on, from a prompt to a published version.

Start reading in `graph.py`, which wires them: rollout, score (in `intake.py`), train, publish, and evaluate beside them.
`pipeline.py` has the ports that they take and what travels between them. `building.py` is the way from rows to microbatches.
"""
