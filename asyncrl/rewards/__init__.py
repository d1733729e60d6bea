"""Rewards: functions in worker processes, then reward models on the device. Start reading in `pool.py`.

This module must stay empty, since every worker process imports it and should start fast.
"""
