"""The parallelisms, one folder each; layers get their groups in their constructors."""
