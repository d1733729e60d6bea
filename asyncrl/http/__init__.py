"""HTTP servers that take groups for a run, in the protocol of another project. Needs the extra `[http]`.

Start reading in `atropos.py`.
"""
