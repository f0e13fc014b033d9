"""FLOPs against the published yardstick's figure and a count of real parameters."""

import pytest

from megafour.architecture.attention import seen_keys
from megafour.architecture.model import Architecture
from megafour.architecture.weights import TensorParallel
from megafour.config.model_schema import ModelConfig
from megafour.cost.flops import known_peak, mfu, model_flops


def llama(**changes):
    """The yardstick's Llama: 512 wide, 8 layers, 8 heads, 4 key/value heads."""
    return ModelConfig(**{**dict(num_layers=8, hidden_size=512, num_attention_heads=8, num_key_value_heads=4,
                                 ffn_hidden_size=1408, activation="swiglu", vocab_size=32000, norm="rmsnorm"),
                          **changes})


def flops_of(**changes):
    return model_flops(Architecture(llama(**changes), 32000), 1024)


def layer_parameters(model):
    """Parameters of each layer, which are alike."""
    (count,) = {layer.count for layer in Architecture(model, 0).layers}
    return count


def test_yardstick():
    flops = flops_of()
    assert flops.per_token == 265_079_808
    assert flops.head / flops.layers[0].total == pytest.approx(4.7, abs=0.05)    # a head is as much as 4.7 layers


def test_layer_parameters():
    assert layer_parameters(llama()) == 2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1408 + 2 * 512
    assert layer_parameters(llama(qk_norm=True)) - layer_parameters(llama()) == 2 * 64
    gpt2 = llama(num_layers=12, hidden_size=768, num_attention_heads=12, num_key_value_heads=12, ffn_hidden_size=3072,
                 activation="gelu", norm="layernorm", qkv_bias=True, linear_bias=True)
    assert layer_parameters(gpt2) == 7_087_872  # GPT-2 124M's h.0, summed in transformers


def test_wider_heads_cost_more_over_the_pairs_of_tokens():
    assert flops_of(head_dim=128).layers[0].pairs == 2 * flops_of().layers[0].pairs


def test_windows_count_the_pairs_that_see_each_other():
    for seq, window in ((64, 64), (64, 10), (64, 1), (64, None)):
        pairs = sum(min(i + 1, window or seq) for i in range(seq))
        # a pair on the diagonal, or on the window's far edge, counts half, as in the S/2 of the causal mask
        assert abs(seen_keys(seq, window) * seq / 2 - pairs) <= seq / 2 + seq
    assert seen_keys(64) == 64 and seen_keys(4096, 8192) == 4096
    mixed = flops_of(attention_window=[None, 128])
    assert [layer.pairs for layer in mixed.layers[:2]] == [6 * 512 * 1024, 6 * 512 * 240]
    assert flops_of().per_token - mixed.per_token == 4 * 6 * 512 * (1024 - 240)


def test_mfu():
    assert mfu(1000, 2e9, 1.0, 4) == pytest.approx(0.5)
    assert mfu(1000, 2e9, None, 4) is None


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", 756.0),
                                            ("NVIDIA H200", 989.0), ("NVIDIA GeForce RTX 4090", None)])
def test_peaks_are_known_by_a_part_of_the_device_name(name, peak):
    assert known_peak(name) == peak


@pytest.mark.parametrize(("tp", "sequence_parallel", "elements"), [
    (1, False, 4 * 512 + 2 * (8 + 4) * 64 + 3 * 1408), (4, False, 4 * 512 + 2 * (2 + 1) * 64 + 3 * 352),
    (4, True, 4 * 128 + 2 * (2 + 1) * 64 + 3 * 352), (8, True, 4 * 64 + 2 * (1 + 1) * 64 + 3 * 176)])
def test_what_a_layer_keeps_of_a_token(tp, sequence_parallel, elements):
    """Two norms' inputs and outputs; queries, keys, values and attention's output, where 8 ranks hold a K/V head each
    of four; gate, up and their product."""
    (layer, *_), at = Architecture(llama(), 32000).layers, TensorParallel(tp, 0, sequence_parallel)
    assert layer.saved(at, "none") == layer.saved(at, "selective") == elements
    assert layer.saved(at, "full") == 512 // (tp if sequence_parallel else 1)
