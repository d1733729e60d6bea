"""HTTP doors into a run, for programs that speak another project's protocol. Needs the extra `[http]`.

Start reading in `atropos.py`.
"""
