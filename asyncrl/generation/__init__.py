"""Engines: sampling tokens from the policy, behind `ports.Engine`.

Start reading in `owner.py`, what every engine shares, and `embedded/engine.py`, the one that decodes on the trainer's device.
"""
