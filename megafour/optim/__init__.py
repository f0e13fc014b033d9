"""Optimizers over sharded masters, and learning-rate schedules as pure functions of the step."""
