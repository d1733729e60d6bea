"""Sends each new version of the weights from the trainer to the engines. Start in `sync.py`."""
