"""The policy as an HTTP endpoint that speaks the protocols of OpenAI and Anthropic, for agents that have a client of their own.

Start reading in `endpoint.py`. Needs the extra `[http]`.
"""
