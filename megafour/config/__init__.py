"""The configuration of a run: schema, presets, loading and the rules between keys. Nothing here imports torch."""
