"""The weights of a model: their source, one flat buffer for all weights, packed copies, adapters. Start in `flat.py`."""
