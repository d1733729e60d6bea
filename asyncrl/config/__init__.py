"""The configuration: one frozen tree of settings, each with the sentence that `--help` prints. No torch at import time.

Start reading in `schema.py`. `load.py` reads files and overrides, `resolve.py` fills in derived settings and checks all settings,
and `imports.py` loads the user's functions that a configuration names.
"""
