"""The model described without torch: each layer by its index, its weights, FLOPs, saved bytes and collectives."""
