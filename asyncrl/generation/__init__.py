"""Engines: sampling tokens from the policy, behind `ports.Engine`."""
