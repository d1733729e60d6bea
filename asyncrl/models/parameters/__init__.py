"""Weights: where they come from, one buffer for all of them, packed copies, adapters. Start in `flat.py`."""
