"""Rewards: functions in worker processes, then reward models on the device. Start reading in `pool.py`.

Keep this module empty: every worker process imports it, and must start fast.
"""
