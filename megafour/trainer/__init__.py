"""Training: the order of one step, the loop around it, its metrics and its signals."""
