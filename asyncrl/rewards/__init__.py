"""Rewards: the user's plain functions, run in worker processes of our own (`rewards.pool.RewardPool`).

This module stays empty: every worker process imports it, and start-up time counts.
"""
