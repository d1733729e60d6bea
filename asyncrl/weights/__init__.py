"""How an engine comes to have version v of the weights: all of it is `sync.py`."""
