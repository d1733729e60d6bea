"""Rewards: functions in worker processes (`pool.py`), and reward models on the device (`models.py`).

This module must stay empty, since every worker process imports it and should start fast.
"""
