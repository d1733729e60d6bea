"""Sends each new version of the policy's weights from the trainer to the engines that generate. Start in `sync.py`."""
