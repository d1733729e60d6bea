"""The pumps: coroutines that move groups one stage on, from a prompt to a published version.

Start reading in `graph.py`, which wires them: rollout, score, train, publish, and evaluate beside them. `pipeline.py` is what they
share; the other files are each one question that a pump asks (advantages, filters, replay, rounds).
"""
