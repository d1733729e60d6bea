"""The train step: `begin_train_step`, any number of microbatches, `finish_train_step`. The split changes no gradient.

Start in `trainer.py` (one rank) and `sharded.py` (a model sharded over ranks). `passes.py` is one forward. `lane_trainer.py` runs
the trainer on the device's thread, behind the port `Trainer`.
"""
