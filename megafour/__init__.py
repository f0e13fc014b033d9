"""megafour: a 4D-parallel (DP×PP×TP×CP) pretraining framework in which every mesh is the same model."""

__version__ = "0.1.0"
