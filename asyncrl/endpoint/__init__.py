"""The policy as an HTTP endpoint that speaks the protocols of OpenAI and Anthropic, for agents that bring their own client.

Start reading in `endpoint.py`. Needs the extra `[http]`.
"""
