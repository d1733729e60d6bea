"""Rewards: functions in worker processes of our own (`rewards.pool.RewardPool`), and reward models (`models.py`).

This module stays empty: every worker process imports it, and start-up time counts.
"""
