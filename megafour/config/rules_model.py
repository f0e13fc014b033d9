"""Rules on the model's shape, alone and against tensor parallelism."""

from collections.abc import Iterator

from megafour.config.schema import Config


def model_rules(config: Config) -> Iterator[str]:
    """One message for each broken rule."""
    yield from _heads(config)
    yield from _ffn(config)
    yield from _positions(config)
    yield from _rope_scaling(config)


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
    if model.position == "rope" and model.head_size % 2:
        yield (f"rope rotates pairs: model.head_dim {model.head_size} (hidden_size {model.hidden_size} / "
               f"num_attention_heads {model.num_attention_heads} where it is not set) is odd; make it even")
    limit = model.max_position_embeddings
    if model.position == "learned" and limit is not None and limit < seq:
        yield (f"learned positions: data.seq_length {seq} > model.max_position_embeddings {limit}; lower "
               "data.seq_length or raise model.max_position_embeddings")
    if model.position == "learned" and model.rope_scaling is not None:
        yield "model.rope_scaling is set and model.position = learned has no rotary frequencies; set it to null"


def _rope_scaling(config: Config) -> Iterator[str]:
    """Each kind has its own keys: one that has no effect is a mistake."""
    scaling = config.model.rope_scaling
    if scaling is None:
        return
    own = {
        "linear": (),
        "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    }[scaling.type]
    if scaling.factor < 1:
        yield f"model.rope_scaling.factor {scaling.factor:g} < 1 would shorten the context; set it to 1 or more"
    if scaling.type != "linear" and scaling.original_max_position_embeddings is None:
        yield f"model.rope_scaling.type = {scaling.type} needs model.rope_scaling.original_max_position_embeddings"
    for key in type(scaling).model_fields:
        value = getattr(scaling, key)
        if key not in ("type", "factor", *own) and value is not None:
            # The original length is written into linear configs too, and harms nobody.
            if key != "original_max_position_embeddings":
                yield f"model.rope_scaling.{key} = {value} has no effect on type = {scaling.type}; remove it"
    low, high = scaling.low_freq_factor or 1.0, scaling.high_freq_factor or 4.0
    if scaling.type == "llama3" and low >= high:
        yield (f"model.rope_scaling.low_freq_factor {low:g} ≥ model.rope_scaling.high_freq_factor {high:g}; "
               "the band between them would be empty")
