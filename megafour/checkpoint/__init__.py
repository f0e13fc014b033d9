"""Mesh-free checkpoints: logical tensors written whole by any mesh and read by any other."""
