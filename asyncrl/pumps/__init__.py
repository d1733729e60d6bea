"""The pumps: coroutines that move groups from stage to stage, from a prompt to a published version of the weights.

Start reading in `graph.py`, which connects the five pumps: rollout, score (in `intake.py`), train, publish and evaluate.
`pipeline.py` has their ports, the publication and the report of a step. `building.py` makes microbatches of rows.
"""
