"""Attention over packed prefix trees. Start in `interface.py`: what a layer asks for, and who acts on it."""
