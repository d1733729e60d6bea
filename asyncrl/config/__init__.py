"""The configuration: one frozen tree of settings, each with the sentence that `--help` prints. No torch at import time.

Start reading in `schema.py`. `load.py` reads files and overrides, `resolve.py` fills in what is derived and checks the whole;
`imports.py` loads the user's functions that a configuration names.
"""
