"""Communication: primitives explicit in their group, their autograd pairs, and the traffic ledger."""
