"""The embedded engine samples from the trainer's own model, in this process and on its lane.

Start reading in `engine.py` (admission and the order of steps) and `core.py` (the computation on the lane).
"""
