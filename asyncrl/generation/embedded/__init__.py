"""The embedded engine samples from a model in this process, on its lane: the trainer's own model, or a worker's.

Start reading in `engine.py` (admission and the order of steps) and `core.py` (the computation on the lane).
"""
