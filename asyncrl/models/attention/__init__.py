"""Attention over packed trees. Start in `interface.py`: it connects the model's attention layers with asyncrl's plans."""
