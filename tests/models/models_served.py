"""A weight board, as a node and its worker have it."""

from __future__ import annotations

import os

from asyncrl.models.policy import PolicyModel
from asyncrl.transport.memory.board import Board


def board_of(trainer: PolicyModel, boards: list[Board]) -> tuple[Board, Board]:
    """The owner's, and a reader's, whose memory is read-only."""
    weights = trainer.weights
    owner = Board.create(weights.size, weights.working.dtype, weights.layout_digest())
    reader = Board.attach(owner.description, os.dup(owner.fd), weights.layout_digest())
    boards += [owner, reader]
    return owner, reader
