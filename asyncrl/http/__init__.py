"""The HTTP server of a run's doors, and the checks of its requests. Needs the extra `[http]`.

Start reading in `server.py`.
"""
