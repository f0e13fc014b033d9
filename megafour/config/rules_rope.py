"""Rules on rotary embeddings: frequencies that no scaling of released models gives are refused."""

from collections.abc import Iterator

from megafour.config.model_schema import RopeScaling
from megafour.config.schema import Config

_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
"""Frequencies and tables are fp32: numbers beyond would be zero or infinite there."""
_OWN_KEYS = {
    "linear": (),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}


def rope_rules(config: Config) -> Iterator[str]:
    """One message for each broken rule."""
    model = config.model
    if model.position != "rope":
        if model.rope_scaling is not None:
            yield "model.rope_scaling is set and model.position = learned has no rotary frequencies; set it to null"
        return
    if model.head_size % 2:
        yield (f"rope rotates pairs: model.head_dim {model.head_size} (hidden_size {model.hidden_size} / "
               f"num_attention_heads {model.num_attention_heads} where it is not set) is odd; make it even")
    if model.rope_theta < 1:
        yield (f"rotary frequencies are rope_theta^(-2i / head_dim): with model.rope_theta {model.rope_theta:g} < 1 "
               "they would grow with the dimension, beyond one radian per token; set it to 1 or more")
    else:
        yield from _held_in_fp32("model.rope_theta", model.rope_theta)
    if model.rope_scaling is not None:
        yield from _scaling(config, model.rope_scaling)


def _held_in_fp32(key: str, value: float) -> Iterator[str]:
    if value > _LARGEST:
        yield f"{key} {value:g} > 2^127, which fp32 cannot hold; lower it"
    elif value < _SMALLEST:
        yield f"{key} {value:g} < 2^-126, which fp32 cannot hold; raise it"


def _scaling(config: Config, scaling: RopeScaling) -> Iterator[str]:
    """Each kind has its own keys: one that has no effect is a mistake."""
    if scaling.factor < 1:
        yield f"model.rope_scaling.factor {scaling.factor:g} < 1 would shorten the context; set it to 1 or more"
    for key in type(scaling).model_fields:
        value = getattr(scaling, key)
        if isinstance(value, float):
            yield from _held_in_fp32(f"model.rope_scaling.{key}", value)
        if key not in ("type", "factor", *_OWN_KEYS[scaling.type]) and value is not None:
            # The original length is written into linear configs too, and harms nobody.
            if key != "original_max_position_embeddings":
                yield f"model.rope_scaling.{key} = {value} has no effect on type = {scaling.type}; remove it"
    if scaling.type == "linear":
        return
    if scaling.original_max_position_embeddings is None:
        yield f"model.rope_scaling.type = {scaling.type} needs model.rope_scaling.original_max_position_embeddings"
        return
    yield from _llama3(scaling) if scaling.type == "llama3" else _yarn(config, scaling)


def _llama3(scaling: RopeScaling) -> Iterator[str]:
    low, high = scaling.low_freq_factor or 1.0, scaling.high_freq_factor or 4.0
    if low >= high:
        yield (f"model.rope_scaling.low_freq_factor {low:g} ≥ model.rope_scaling.high_freq_factor {high:g}; "
               "the band between them would be empty")


def _yarn(config: Config, scaling: RopeScaling) -> Iterator[str]:
    theta = config.model.rope_theta
    fast, slow = scaling.beta_fast or 32.0, scaling.beta_slow or 1.0
    if theta == 1:
        yield ("yarn's band of dimensions divides by ln(model.rope_theta): model.rope_theta 1 gives 0; raise it, or "
               "set model.rope_scaling to null")
        return
    if fast < slow:
        yield (f"model.rope_scaling.beta_fast {fast:g} < model.rope_scaling.beta_slow {slow:g}; dimensions that turn "
               "more often than beta_fast are kept, so beta_fast is the larger one: swap them")
