"""Communication: primitives explicit in their group, the exchange with its backward, and the traffic ledger."""
