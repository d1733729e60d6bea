"""The train step: `begin_train_step`, microbatches, `finish_train_step`. Their number changes no gradient, except with `bnpo`.

Start in `trainer.py` (a rank has the whole model) and `sharded.py` (the model is sharded over ranks). `passes.py` is one forward.
`lane_trainer.py` runs the trainer on the device's thread, and implements the port `Trainer`.
"""
