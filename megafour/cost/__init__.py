"""Formulas for FLOPs and bytes: pure functions, no torch."""
