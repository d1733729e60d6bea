"""Takes groups for a run over HTTP, in the protocol of Atropos. Needs the extra `[http]`.

Start reading in `door.py`.
"""
