"""An HTTP endpoint where the policy answers in the protocols of OpenAI and Anthropic, for agents with a client of their own.

Start reading in `endpoint.py`. Needs the extra `[http]`.
"""
