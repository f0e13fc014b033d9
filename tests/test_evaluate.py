"""Evaluation: equal to transformers' loss on every mesh, padding uncounted, texts and datasets, one line of errors."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megafour.cli import main as cli
from megafour.data.errors import DataError
from megafour.data.indexed import IndexedWriter
from megafour.inference.convert import from_huggingface
from megafour.inference.evaluate import Evaluation, evaluate, settings_for
from megafour.inference.load import find_model, load_stage, model_settings
from megafour.mesh import Mesh
from megafour.trainer.setup import build_mesh
from tests.huggingface import VOCAB, doubled, save_model

transformers = pytest.importorskip("transformers")

MESHES = {"dp3": 3, "tp2": 2, "pp3": 3, "cp2": 2, "tp2-cp2": 4, "dp2-pp2-tp2": 8}
LENGTH = 62    # 61 predictions in windows of 16: neither windows, micro-batches nor shards come out even


def stream(length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(5).integers(0, VOCAB, length)


def reference(model, ids: np.ndarray, window: int) -> float:
    """transformers' mean loss over windows that overlap by one token."""
    total = 0.0
    for start in range(0, len(ids) - 1, window):
        piece = torch.as_tensor(ids[start : start + window + 1])
        with torch.no_grad():
            total += float(F.cross_entropy(model(piece[None, :-1]).logits[0], piece[1:], reduction="sum"))
    return total / (len(ids) - 1)


def evaluate_on(rank: int, world: int, path: str, overrides: list[str], ids: np.ndarray) -> Evaluation:
    folder = find_model(Path(path))
    settings = settings_for(model_settings(folder, overrides, "fp64"), world, len(ids), 2)
    model = load_stage(folder, settings.config, build_mesh(settings.config, torch.device("cpu")))
    return evaluate(model, ids, "ids", settings.window)


@pytest.mark.parametrize("kind", ["smollm", "gpt2"])
def test_every_mesh_gives_the_loss_of_transformers(pool, tmp_path, kind):
    want = reference(doubled(save_model(kind, tmp_path / "hf")), stream(), 16)
    from_huggingface(tmp_path / "hf", tmp_path / "ours")
    for source, meshes in (("hf", {"dp1": 1, **MESHES}), ("ours", {"tp2-cp2": 4, "pp3": 3})):
        for mesh, world in meshes.items():
            overrides = [f"parallel.{axis[:2]}={axis[2:]}" for axis in mesh.split("-") if not axis.startswith("dp")]
            found = pool.run(evaluate_on, world, str(tmp_path / source), [*overrides, "data.seq_length=16"], stream())
            assert all(one == found[0] for one in found) and found[0].tokens == LENGTH - 1
            assert abs(found[0].loss - want) <= 1e-9 * want, (source, mesh)


def evaluate_in_shares(rank: int, world: int, path: str, overrides: list[str], ids: np.ndarray) -> tuple[float, int]:
    """(loss, bytes of the weights that the stage holds afterwards)."""
    folder = find_model(Path(path))
    settings = settings_for(model_settings(folder, overrides, "fp64"), world, len(ids), 2)
    model = load_stage(folder, settings.config, build_mesh(settings.config, torch.device("cpu")))
    loss = evaluate(model, ids, "ids", settings.window).loss
    return loss, sum(param.untyped_storage().nbytes() for param in model.stage.parameters())


def test_under_zero_3_no_rank_holds_the_weights(pool, tmp_path):
    """dp 4, whole and hybrid, with a tied embedding; and beside tp and cp."""
    want = reference(doubled(save_model("smollm", tmp_path / "hf")), stream(), 16)
    for mesh in ([], ["parallel.zero_size=2"], ["parallel.pp=2"], ["parallel.tp=2", "parallel.cp=2"]):
        overrides = ["data.seq_length=16", "parallel.zero_stage=3", *mesh]
        for loss, left in pool.run(evaluate_in_shares, 4, str(tmp_path / "hf"), overrides, stream()):
            assert abs(loss - want) <= 1e-9 * want and left == 0, mesh


BEGINS = np.array([0, 5, 5, 21, 40])    # one is empty


def evaluate_masked(rank: int, world: int, path: str, overrides: list[str], ids: np.ndarray) -> Evaluation:
    config = model_settings(Path(path), ["data.document_mask=true", *overrides], "fp64")
    settings = settings_for(config, world, len(ids))
    model = load_stage(Path(path), settings.config, build_mesh(settings.config, torch.device("cpu")))
    return evaluate(model, ids, "ids", settings.window, BEGINS)


def test_under_a_document_mask_each_document_stands_alone(pool, tmp_path):
    model = doubled(save_model("llama", tmp_path / "hf"))
    pieces = [piece for piece in np.split(stream(), BEGINS[1:]) if len(piece) > 1]
    counts = [len(piece) - 1 for piece in pieces]
    want = sum(reference(model, p, 64) * n for p, n in zip(pieces, counts, strict=True)) / sum(counts)
    for world, overrides in ((1, []), (2, ["parallel.cp=2"]), (4, ["parallel.tp=2", "parallel.pp=2"])):
        for found in pool.run(evaluate_masked, world, str(tmp_path / "hf"), overrides, stream()):
            assert found.tokens == sum(counts) and abs(found.loss - want) <= 1e-9 * want


@pytest.mark.parametrize(("length", "overrides", "world", "window", "padded"), [
    (46, ["parallel.tp=3"], 3, 45, 45), (47, ["parallel.tp=3"], 3, 46, 48), (46, ["parallel.cp=2"], 2, 45, 48),
    (46, ["parallel.tp=2", "parallel.cp=2"], 4, 45, 48), (1000, ["data.seq_length=64", "parallel.tp=3"], 3, 64, 66),
    (1000, ["data.seq_length=50"], 1, 50, 50), (2, ["parallel.cp=2"], 2, 1, 4), (99, ["parallel.cp=5"], 5, 64, 70),
])
def test_the_window_is_that_of_the_config_on_every_mesh(tmp_path, length, overrides, world, window, padded):
    """Whatever the mesh divides; a table of learned positions keeps its size."""
    save_model("gpt2", tmp_path / "hf", torch.float32)
    config = model_settings(tmp_path / "hf", ["model.num_attention_heads=6", "model.head_dim=4",
                                              "model.ffn_hidden_size=96", *overrides])
    found = settings_for(config, world, length)
    assert (found.window, found.config.data.seq_length) == (window, padded)
    assert found.config.model.max_position_embeddings == config.model.max_position_embeddings
    train = found.config.train
    assert train.global_batch_size % (int(found.config.parallel.dp) * train.micro_batch_size) == 0


WALK = {"dp2": 2, "tp3": 3, "cp3": 3, "pp2": 2, "tp2-cp3": 6, "tp3-cp2": 6}
LAYOUTS = {"cp3": [["parallel.context.layout=striped"], ["parallel.context.method=ulysses"]],
           "tp2-cp3": [["parallel.sequence_parallel=false"], ["parallel.context.method=all_gather"]]}

LAYOUT_CASES = {("rope", True, "cp3"), ("rope", False, "cp3"), ("rope", False, "tp2-cp3")}


def evaluate_all(rank: int, world: int, path: str, overrides: list[str], windows: list[int],
                 masked: bool) -> list[tuple[float, int]]:
    ids, begins = stream(230), np.array([0, 31, 110, 111]) if masked else None
    words = [*overrides, f"data.document_mask={str(masked).lower()}"]
    found = []
    for window in windows:
        settings = settings_for(model_settings(Path(path), [*words, f"data.seq_length={window}"], "fp64"), world, 230)
        model = load_stage(Path(path), settings.config, build_mesh(settings.config, torch.device("cpu")))
        result = evaluate(model, ids, "ids", settings.window, begins)
        found.append((result.loss, result.tokens))
    return found


@pytest.mark.parametrize(("kind", "masked"), [
    ("learned", False), ("rope", True), ("windowed", False),
    *(pytest.param(kind, masked, marks=pytest.mark.full) for kind, masked in (
        ("learned", True), ("rope", False), ("windowed", True)))])
def test_windows_that_no_mesh_divides_give_the_loss_of_one_process(pool, tmp_path, deviation, kind, masked):
    """Learned positions end at the window itself; documents, layouts and attention windows meet the padding."""
    windows = {"learned": [100, 97], "rope": [100, 7], "windowed": [97]}[kind]
    save_wide_model(kind, tmp_path / "hf")
    extra = ["model.attention_window=5"] if kind == "windowed" else []
    want = pool.run(evaluate_all, 1, str(tmp_path / "hf"), extra, windows, masked)[0]
    for mesh, world in WALK.items():
        axes = [f"parallel.{axis[:2]}={axis[2:]}" for axis in mesh.split("-") if not axis.startswith("dp")]
        for options in [[], *(LAYOUTS[mesh] if (kind, masked, mesh) in LAYOUT_CASES else [])]:
            found = pool.run(evaluate_all, world, str(tmp_path / "hf"), [*axes, *options, *extra], windows, masked)
            for one in found:
                assert [count for _, count in one] == [count for _, count in want]
                worst = max(abs(a - b) / b for (a, _), (b, _) in zip(one, want, strict=True))
                deviation(worst)
                assert worst <= 1e-9, (mesh, options, masked, worst)


def save_wide_model(kind: str, folder: Path) -> None:
    """A model of six heads, random enough that one token too few in a context is seen."""
    torch.manual_seed(4)
    if kind == "learned":
        config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=6, n_positions=100,
                                         initializer_range=0.2)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        return
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=100, initializer_range=0.2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def test_a_text_may_be_shorter_than_the_context_before_the_stretch(tmp_path):
    """As the sequences of the run that saved the model were: its longest position is that of those."""
    save_model("yarn", tmp_path / "hf", torch.float32)      # stretched from 16 positions
    config = model_settings(tmp_path / "hf", ["data.seq_length=12", "model.max_position_embeddings=12"])
    assert settings_for(config, 1, 8).window == 7


def test_ids_outside_the_vocabulary_and_empty_streams_are_refused(tmp_path):
    save_model("llama", tmp_path / "hf", torch.float32)
    config = settings_for(model_settings(tmp_path / "hf"), 1, 5).config
    model = load_stage(tmp_path / "hf", config, Mesh.single())
    with pytest.raises(DataError, match="token id 67, outside the vocabulary of 67"):
        evaluate(model, np.array([1, 2, VOCAB]), "x", 4)
    with pytest.raises(DataError, match="x has 1 tokens"):
        evaluate(model, np.array([1]), "x", 4)


@pytest.fixture
def folder(tmp_path):
    """A model with a byte-level tokenizer of its size."""
    import tokenizers

    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["the quick brown fox " * 20], vocab_size=VOCAB + 211, special_tokens=["</s>"])
    config = transformers.LlamaConfig(vocab_size=tokenizer.get_vocab_size(), hidden_size=16, intermediate_size=24,
                                      num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=32)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "fox.txt").write_text("the quick brown fox jumps\r\nüber the lazy dog\n")
    return tmp_path


def test_the_verb_on_text_and_data(folder, capsys, monkeypatch):
    """The text as it is (line ends too), the same tokens as a dataset, from both kinds of --checkpoint."""
    monkeypatch.chdir(folder)
    ids = transformers.PreTrainedTokenizerFast(tokenizer_file="hf/tokenizer.json").encode(
        (folder / "fox.txt").read_bytes().decode(), add_special_tokens=False)
    with IndexedWriter("data", 300) as writer:
        writer.add(ids)
    model = transformers.AutoModelForCausalLM.from_pretrained("hf", dtype=torch.float64)
    want = reference(doubled(model), np.array(ids), 32)
    assert cli.main(["convert", "from-hf", "hf", "ours"]) == 0
    capsys.readouterr()
    for source in (["--hf", "hf"], ["--checkpoint", "ours"], ["--checkpoint", "ours/step-00000000"]):
        for what in (["--text", "fox.txt"], ["--data", "data"]):
            assert cli.main(["evaluate", *source, *what, "--json", "train.precision=fp64"]) == 0
            found = json.loads(capsys.readouterr().out)
            assert list(found) == ["loss", "perplexity", "tokens"] and found["tokens"] == len(ids) - 1
            assert abs(found["loss"] - want) <= 1e-9 * want
            assert abs(found["perplexity"] - np.exp(want)) <= 1e-8 * np.exp(want)
    assert cli.main(["evaluate", "--hf", "hf", "--text", "fox.txt"]) == 0
    words = capsys.readouterr().out.split()
    assert abs(float(words[0]) - want) <= 1e-5 * want and words[-2:] == [str(len(ids) - 1), "tokens"]
    assert cli.main(["generate", "--checkpoint", "hf", "--prompt", "the quick", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("the quick")


@pytest.mark.parametrize("mask", ["true", "false"])
def test_records_are_read_and_separated_as_prepare_does(folder, capsys, monkeypatch, mask):
    """The loss of a text file of records is that of the dataset made of it, whatever its kind."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.chdir(folder)
    texts = ["the quick brown fox", "", "jumps über the lazy dog " * 4, "the"]
    rows = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    Path("a.jsonl").write_text(rows)
    Path("a.json").write_bytes(b"\xef\xbb\xbf" + rows.encode())
    Path("a.ndjson.gz").write_bytes(gzip.compress(rows.encode()))
    pq.write_table(pa.table({"body": texts}), "a.parquet")
    assert cli.main(["prepare", "a.jsonl", "--output", "data", "--tokenizer", "huggingface:hf/tokenizer.json",
                     "--json-key", "body", "--workers", "1"]) == 0
    capsys.readouterr()
    found = []
    for what in (["--data", "data"], *(["--text", name, "--json-key", "body"]
                                       for name in ("a.jsonl", "a.json", "a.ndjson.gz", "a.parquet"))):
        assert cli.main(["evaluate", "--hf", "hf", *what, "--json", f"data.document_mask={mask}"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert all(one == found[0] for one in found) and found[0]["tokens"] > 20


def test_a_byte_order_mark_and_compression_change_no_token(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    raw = Path("fox.txt").read_bytes()
    Path("bom.txt").write_bytes(b"\xef\xbb\xbf" + raw)
    Path("fox.txt.gz").write_bytes(gzip.compress(raw))
    Path("README").write_bytes(raw)     # another name than the known ones: text too
    found = []
    os.mkfifo("pipe")       # as `--text <(command)` gives it
    threading.Thread(target=Path("pipe").write_bytes, args=[raw], daemon=True).start()
    for name in ("fox.txt", "bom.txt", "fox.txt.gz", "README", "pipe"):
        assert cli.main(["evaluate", "--hf", "hf", "--text", name, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize(("argv", "code", "words"), [
    (["--hf", "hf", "--text", "nul.jsonl.gz"], 2, "nul.jsonl.gz is empty (0 bytes)"),
    (["--hf", "hf", "--text", "wide.txt"], 2, "wide.txt is UTF-16 text"),
    (["--hf", "hf", "--text", "latin.txt"], 2, "latin.txt:1: not UTF-8 at byte 0"),
    (["--hf", "hf", "--text", "bad.jsonl"], 2, "bad.jsonl:2: has no key 'text' (found: body); name one"),
    (["--hf", "nowhere", "--text", "fox.txt"], 1, "nowhere is no Hugging Face folder"),
    (["--checkpoint", "nowhere", "--text", "fox.txt"], 1, "neither a whole checkpoint"),
    (["--hf", "hf", "--text", "nowhere.txt"], 2, "nowhere.txt cannot be read: No such file"),
    (["--hf", "hf", "--text", "empty.txt"], 2, "has 0 tokens"),
    (["--hf", "hf", "--data", "nowhere"], 2, "nowhere.idx does not exist"),
    (["--hf", "hf", "--text", "fox.txt", "parallel.tp=2"], 2, "world = dp · pp · tp · cp"),
    (["--hf", "hf", "--text", "fox.txt", "paralel.tp=2"], 2, "not a key"),
    (["--hf", "bare", "--text", "fox.txt"], 1, "no tokenizer"),
    (["--hf", "hf", "--text", "fox.txt", "run.device=cuda"], 2, "this machine has 0 GPUs and 1 local ranks"),
])
def test_what_cannot_be_evaluated_is_one_line(folder, capsys, monkeypatch, argv, code, words):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    save_model("llama", folder / "bare", torch.float32)
    (folder / "empty.txt").write_text("")
    (folder / "nul.jsonl.gz").write_bytes(b"")
    (folder / "wide.txt").write_text("text", encoding="utf-16")
    (folder / "latin.txt").write_text("über", encoding="latin-1")
    (folder / "bad.jsonl").write_text('{"text": "x"}\n{"body": "y"}\n')
    capsys.readouterr()
    assert cli.main(["evaluate", *argv]) == code
    out, err = capsys.readouterr()
    assert words in err and err.count("\n") == 1 and not out
