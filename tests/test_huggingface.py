"""Hugging Face folders: each family in and out with equal logits, exports that no mesh shows in, refusals by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megafour.checkpoint import store
from megafour.checkpoint.checksum import crc32
from megafour.checkpoint.errors import CheckpointError
from megafour.config.errors import ConfigError
from megafour.config.huggingface import read_huggingface
from megafour.config.load import config_from
from megafour.config.rules import resolve
from megafour.data.errors import DataError
from megafour.inference.convert import from_huggingface, to_huggingface
from tests.huggingface import MODELS, deviation_of, doubled, logits_of, open_model, our_logits, save_model

pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", MODELS)
def test_in_and_out_with_equal_logits(tmp_path, kind):
    """fp64: ours on the folder and on the checkpoint, and transformers on the export, which has the same bits."""
    want = logits_of(doubled(save_model(kind, tmp_path / "hf")))
    assert deviation_of(our_logits(tmp_path / "hf"), want) <= 1e-9
    from_huggingface(tmp_path / "hf", tmp_path / "ours")
    assert deviation_of(our_logits(tmp_path / "ours"), want) <= 1e-9
    to_huggingface(tmp_path / "ours", tmp_path / "back")
    assert torch.equal(logits_of(open_model(tmp_path / "back")), want)
    assert resolved(tmp_path / "back") == resolved(tmp_path / "hf")
    name = "model.safetensors"
    assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def resolved(folder: Path) -> object:
    """The `model` section that a folder stands for, derived values filled in."""
    return resolve(config_from({"model": read_huggingface(folder), "data": {"seq_length": 8}}), 1, data=False).model


@pytest.mark.parametrize("kind", ["smollm", "gpt2"])
def test_sharded_folders_both_ways(tmp_path, kind):
    """As several files in, as several files out; the tensors are the same bits, in bf16."""
    save_model(kind, tmp_path / "hf", torch.bfloat16, max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    from_huggingface(tmp_path / "hf", tmp_path / "ours")
    files = to_huggingface(tmp_path / "ours", tmp_path / "back", shard_bytes=20_000)
    assert len(files) > 3 and sorted(files) == sorted(p.name for p in (tmp_path / "back").glob("*.safetensors"))
    before, after = whole(tmp_path / "hf"), whole(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert torch.equal(logits_of(open_model(tmp_path / "back", torch.float32)),
                       logits_of(open_model(tmp_path / "hf", torch.float32)))


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's files."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_rounded_export(tmp_path):
    save_model("llama", tmp_path / "hf", torch.float32)
    from_huggingface(tmp_path / "hf", tmp_path / "ours")
    to_huggingface(tmp_path / "ours", tmp_path / "back", torch.bfloat16)
    before, after = whole(tmp_path / "hf"), whole(tmp_path / "back")
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_old_names_and_constants_are_known(tmp_path):
    """Files of GPT-2's first release: no `transformer.`, and the causal mask among the weights."""
    want = logits_of(save_model("gpt2", tmp_path / "hf").eval())
    path = tmp_path / "hf" / "model.safetensors"
    old = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(old, path)
    assert deviation_of(our_logits(tmp_path / "hf"), want) <= 1e-9


def edit(folder: Path, change) -> None:
    """Change the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def set_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


NORM = "model.norm.weight"
WRONG = {
    "missing": (lambda t: t.pop(NORM), f"missing in the files (1): {NORM}"),
    "unknown": (lambda t: t.update({"model.extra.weight": torch.ones(2)}), "unknown to this model (1): model.extra"),
    "shape": (lambda t: t.update({NORM: torch.ones(31)}), f"{NORM} is (31,) in the file, (32,) in this model"),
    "quantized": (lambda t: t.update({NORM: torch.ones(32, dtype=torch.int8)}), f"{NORM} is I8"),
    "untied head": (lambda t: t.update({"lm_head.weight": torch.ones(67, 32)}), "lm_head.weight differs"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, what):
    change, words = WRONG[what]
    save_model("smollm", tmp_path / "hf", torch.float32)
    edit(tmp_path / "hf", change)
    for refused in (lambda: from_huggingface(tmp_path / "hf", tmp_path / "ours"), lambda: our_logits(tmp_path / "hf")):
        with pytest.raises(CheckpointError) as error:
            refused()
        assert words in str(error.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(("values", "word"), [
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"), ({"hidden_act": "relu"}, "hidden_act"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
    ({"model_type": "mixtral"}, "mixtral"), ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
])
def test_a_config_that_would_not_be_computed_alike_is_refused(tmp_path, values, word):
    save_model("llama", tmp_path / "hf", torch.float32)
    set_config(tmp_path / "hf", **values)
    for refused in (lambda: from_huggingface(tmp_path / "hf", tmp_path / "ours"), lambda: our_logits(tmp_path / "hf")):
        with pytest.raises(ConfigError, match=word):
            refused()


def test_no_pickle_and_no_foreign_file_is_read(tmp_path):
    save_model("llama", tmp_path / "hf", torch.float32, max_shard_size="20KB")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    good = index.read_text()
    index.write_text(good.replace("model-00001-of", "../model-00001-of"))
    with pytest.raises(CheckpointError, match="only safetensors files of the same folder"):
        our_logits(tmp_path / "hf")
    index.write_text(good)
    first = sorted((tmp_path / "hf").glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=f"{first.name} cannot be read"):
        our_logits(tmp_path / "hf")
    first.unlink()
    with pytest.raises(CheckpointError, match=f"not whole: {first.name}"):
        our_logits(tmp_path / "hf")
    for file in (tmp_path / "hf").glob("model*"):
        file.unlink()
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(CheckpointError, match="pickles.*safe_serialization=True"):
        from_huggingface(tmp_path / "hf", tmp_path / "ours")


@pytest.mark.parametrize(("values", "key"), [
    ({"activation": "geglu"}, "model.activation = geglu"), ({"norm": "layernorm"}, "model.norm = layernorm"),
    ({"linear_bias": True}, "model.linear_bias = true"), ({"qk_norm": True, "qkv_bias": True}, "model.qkv_bias = true"),
])
def test_a_model_that_no_family_has_is_not_exported(tmp_path, values, key):
    import yaml

    save_model("llama", tmp_path / "hf", torch.float32)
    path = from_huggingface(tmp_path / "hf", tmp_path / "ours") / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["model"].update(values)
    path.write_text(yaml.safe_dump(config))
    manifest = json.loads(path.with_name("manifest.json").read_text())
    manifest["files"]["config.yaml"], manifest["crc32"]["config.yaml"] = path.stat().st_size, f"{crc32(path):08x}"
    path.with_name("manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError) as error:
        to_huggingface(tmp_path / "ours", tmp_path / "back")
    assert key in str(error.value) and not (tmp_path / "back").exists()


def test_damaged_generation_settings_are_named(tmp_path):
    save_model("llama", tmp_path / "hf", torch.float32)
    (tmp_path / "hf" / "generation_config.json").write_text("{")
    from_huggingface(tmp_path / "hf", tmp_path / "ours")
    with pytest.raises(DataError, match="generation_config.json cannot be read as JSON"):
        to_huggingface(tmp_path / "ours", tmp_path / "back")


def test_nothing_is_overwritten_and_nothing_half_written_stays(tmp_path, monkeypatch):
    save_model("llama", tmp_path / "hf", torch.float32)
    from_huggingface(tmp_path / "hf", tmp_path / "ours")
    shutil.copytree(tmp_path / "hf", tmp_path / "back")
    with pytest.raises(CheckpointError, match="not empty"):
        to_huggingface(tmp_path / "ours", tmp_path / "back")
    with pytest.raises(CheckpointError, match="not empty"):
        from_huggingface(tmp_path / "hf", tmp_path / "ours")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megafour.checkpoint.huggingface.write_safetensors", full)
    with pytest.raises(CheckpointError, match="No space left"):
        to_huggingface(tmp_path / "ours", tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "hf", "ours"]


def test_the_state_of_an_import(tmp_path):
    """Step 0 of nothing consumed; what trains from it is a new run, so there is no optimizer."""
    save_model("llama", tmp_path / "hf", torch.float32)
    path = from_huggingface(tmp_path / "hf", tmp_path / "ours")
    assert store.read_state(path)["step"] == 0 and store.list_steps(tmp_path / "ours") == [0]
    assert all(name.startswith("weights/") for name in store.stored_tensors(path))


@pytest.mark.parametrize("prefix", [False, True])
def test_a_sentencepiece_tokenizer_goes_with_the_export(tmp_path, prefix):
    """transformers makes the same ids of a text as we do, with and without a space that the model puts in front."""
    import sentencepiece
    import transformers

    from megafour.data.tokenizer import load_tokenizer

    save_model("llama", tmp_path / "hf", torch.float32)
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 30)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "hf" / "tokenizer"), vocab_size=320, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False,
        add_dummy_prefix=prefix, minloglevel=2)
    from_huggingface(tmp_path / "hf", tmp_path / "ours")
    to_huggingface(tmp_path / "ours", tmp_path / "back")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    ours = load_tokenizer("sentencepiece", tmp_path / "back")
    # Before a text that begins with a space itself, transformers puts no second one.
    for text in ("the fox", "the  lazy\n\ndog", "a ü b", *([] if prefix else [" the fox"])):
        assert theirs.encode(text) == ours.encode(text)
