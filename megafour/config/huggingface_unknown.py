"""Keys of a Hugging Face `config.json` that are not read: harmless, harmless at one value, unknown, or refused."""

from __future__ import annotations

import re
from typing import Any

from megafour.config.huggingface_fields import Keys, shown
from megafour.config.notes import say_note

_BOOKKEEPING = (
    "architectures model_type transformers_version torch_dtype dtype _name_or_path name_or_path _commit_hash auto_map "
    "license tokenizer_class transformers.js_config is_llama_config unsloth_fixed unsloth_version torchscript "
    "use_bfloat16 tf_legacy_loss gradient_checkpointing pretraining_tp keys_to_ignore_at_inference"
)
_OUTPUTS = (    # what a forward returns besides its logits, and heads that are no language model
    "output_attentions output_hidden_states output_past output_scores return_dict return_dict_in_generate use_cache "
    "tie_last_hidden_states summary_activation summary_first_dropout summary_proj_to_labels summary_type "
    "summary_use_proj classifier_dropout problem_type num_labels _num_labels id2label label2id finetuning_task "
    "task_specific_params n_special predict_special_tokens is_decoder is_encoder_decoder tie_encoder_decoder"
)
_BACKENDS = (   # which kernel computes the same thing
    "attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal "
    "_experts_implementation _experts_implementation_internal _flash_attn_2_enabled chunk_size_feed_forward "
    "cache_implementation attention_implementation use_flash_attn use_flash_attention use_flash_attention_2"
)
_LENGTHS = (    # `transformers` takes no length but max_position_embeddings (n_positions)
    "n_ctx max_sequence_length max_seq_length max_seq_len seq_length model_max_length"
)
_TOKENS = (
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id "
    "decoder_start_token_id forced_bos_token_id forced_eos_token_id add_bos_token add_eos_token prefix"
)
_GENERATION = (     # `transformers` hands them to its GenerationConfig
    "assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty "
    "do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff "
    "exponential_decay_length_penalty length_penalty max_length max_new_tokens min_length no_repeat_ngram_size "
    "num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences "
    "remove_invalid_values repetition_penalty suppress_tokens target_lookbehind temperature top_k top_p typical_p"
)
HARMLESS = frozenset(" ".join((_BOOKKEEPING, _OUTPUTS, _BACKENDS, _LENGTHS, _TOKENS, _GENERATION)).split())
"""Keys that change nothing of what a decoder computes, whatever their value."""

_STEMS = re.compile(
    "rope|rotary|attn|attention|scal|bias|norm|window|expert|moe|layer|hidden|head|mlp|ffn|drop|softcap|quant|logit|"
    "embe?d|residual|multiplier|gate|gating|router|glu|gelu|silu|relu|qkv|lora|adapter|position|causal|mask|alibi|inner|"
    "intermediate|sink|sparse|conv|mamba|recurren|latent|group|weight|theta|freq|yarn|factor|epsilon|vocab|shared|"
    "per_layer|memory|stride|chunk|block"
)
_WORDS = frozenset("act activation cap dim dims dimension dimensions d tie tied untie qk kv q k v eps beta alpha size "
                   "width depth rank sliding local global ssm mtp".split())
"""Parts of a key's name that point to the forward pass: stems anywhere, these as whole words."""

_ZERO_IS_OFF = re.compile("expert|moe|drop|softcap|window|lora|sink|chunk|pruned")
_ONE_IS_OFF = re.compile("multiplier|partial_rotary|rotary_pct|rotary_percent")
_FALSE_IS_A_CHANGE = re.compile("rope|rotary|norm|causal|gate|gating|residual|scal|tie|position|embed|gelu|silu|mask|"
                                "(^|_)(act|no|not|non|without|disable|skip|remove)")
"""`false` under such a name may switch off what the families have, or switch on what they have not."""


def drop_unknown(keys: Keys, others: dict[str, Any], family: str) -> None:
    """Pass over the keys that nobody reads, or refuse the first that could change what is computed.

    Keys that are not known, and whose names say nothing about the forward pass, are listed in one line.

    Raises:
        ConfigError: naming the key.
    """
    passed = []
    for key, value in others.items():
        if key in HARMLESS or _is_off(key, value, family):
            continue
        if says_forward(key):
            keys.refuse(key, value, f"the key is not known for model_type {family}, and its name says that it may "
                                    "change what is computed; remove it from the file if it does not")
        passed.append(key if re.fullmatch(r"[\w.-]+", key) else shown(key))
    if passed:
        say_note(f"{keys.file}: keys that are not known are ignored; their names say nothing about the forward "
                 f"pass: {', '.join(passed)}")


def says_forward(key: str) -> bool:
    """Whether a key's name says that it may change what the decoder computes."""
    name = _snake(key)
    return _STEMS.search(name) is not None or not _WORDS.isdisjoint(re.split(r"[^a-z0-9]+", name))


def _snake(key: str) -> str:
    """`ropeScaling` -> `rope_scaling`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()


def _is_off(key: str, value: Any, family: str) -> bool:
    """Whether a value switches nothing on: null, empty, or what this family does without the key."""
    name = _snake(key)
    if value is None or (isinstance(value, (str, list, dict)) and not value):
        return True
    if name in ("qk_norm", "use_qk_norm", "qk_layernorm"):
        return value is (family == "qwen3")
    if name in ("qkv_bias", "use_qkv_bias"):
        return value is (family in ("qwen2", "gpt2"))
    if name in ("use_mrope", "rope_interleaved"):   # rotary families have the key, and false is what they compute
        return value is False and family != "gpt2"
    if value is False:
        biased = "bias" in name and family in ("qwen2", "gpt2")
        return not biased and _FALSE_IS_A_CHANGE.search(name) is None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return (value == 0 and _ZERO_IS_OFF.search(name) is not None) or (
        value == 1 and _ONE_IS_OFF.search(name) is not None)
