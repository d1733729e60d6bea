"""The engine that samples from the trainer's own model, in this process and on its lane.

Start reading in `engine.py` (who is admitted, in which order things are done) and `core.py` (what is computed on the lane).
"""
