"""Rules on the model's shape, alone and against tensor parallelism."""

from collections.abc import Iterator

from megafour.config.rules_rope import rope_rules
from megafour.config.schema import Config


def model_rules(config: Config) -> Iterator[str]:
    """One message for each broken rule."""
    yield from _heads(config)
    yield from _ffn(config)
    yield from _positions(config)
    yield from rope_rules(config)


def _heads(config: Config) -> Iterator[str]:
    heads, kv, tp = config.model.num_attention_heads, config.model.kv_heads, config.parallel.tp
    if heads % kv:
        yield (f"grouped queries: model.num_attention_heads {heads} is not a multiple of model.num_key_value_heads "
               f"{kv}; change one of them")
    if heads % tp:
        yield (f"heads per tensor-parallel rank: model.num_attention_heads {heads} is not a multiple of parallel.tp "
               f"{tp}; lower parallel.tp or change model.num_attention_heads")
    if kv % tp and tp % kv:
        yield (f"key/value heads per tensor-parallel rank: neither is model.num_key_value_heads {kv} a multiple of "
               f"parallel.tp {tp}, nor parallel.tp of it (heads repeated on tp / kv ranks); change parallel.tp")


def _ffn(config: Config) -> Iterator[str]:
    ffn, tp = config.model.ffn_size, config.parallel.tp
    if ffn % tp:
        yield (f"MLP columns per tensor-parallel rank: model.ffn_hidden_size {ffn} is not a multiple of parallel.tp "
               f"{tp}; change model.ffn_hidden_size or parallel.tp")


def _positions(config: Config) -> Iterator[str]:
    model, seq = config.model, config.data.seq_length
    limit = model.max_position_embeddings
    if model.position == "learned" and limit is not None and limit < seq:
        yield (f"learned positions: data.seq_length {seq} > model.max_position_embeddings {limit}; lower "
               "data.seq_length or raise model.max_position_embeddings")
