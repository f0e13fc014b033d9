"""Checkpoints on any mesh: round trips, refusals alike on all ranks, interrupted saves, pruning."""

import io
import json
import pickle
import re
import shutil
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megafour.checkpoint import folder, metadata, store
from megafour.checkpoint.checksum import crc32
from megafour.checkpoint.errors import CheckpointError
from megafour.checkpoint.tensors import LogicalTensor, flat_parts

SHAPES = {"weights/embedding.weight": (13, 6), "weights/layers.0.wq.weight": (8, 6),
          "weights/layers.0.norm.weight": (6,), "masters/layers.0.wq.weight": (8, 6), "weights/scale": ()}


def dtype_of(name: str) -> torch.dtype:
    return torch.bfloat16 if name.startswith("weights/") else torch.float32


def truth(shapes: dict) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype_of(n)) for n, s in shapes.items()}


def cut(total: int, parts: int, index: int) -> tuple[int, int]:
    """An uneven split, so that shards of two meshes never line up."""
    edges = [total * i * (i + 1) // (parts * (parts + 1)) for i in range(parts + 1)]
    return edges[index], edges[index + 1]


def hold(layout: str, rank: int, world: int, values: dict[str, torch.Tensor], fill: bool) -> list[LogicalTensor]:
    """What a rank of a mesh holds: the true values, or NaN to be loaded into."""
    held = []
    for number, (name, value) in enumerate(values.items()):
        shape, size = tuple(value.shape), list(value.shape)
        offset, primary, flat = [0] * len(size), True, None
        if layout == "dp":
            primary = rank == 0
        elif layout == "pp":
            if number % world != rank:
                continue
        elif layout in ("rows", "columns") and value.dim() == 2:
            dim = 0 if layout == "rows" else 1
            offset[dim], stop = cut(shape[dim], world, rank)
            size[dim] = stop - offset[dim]
        elif layout == "zero":
            flat = cut(value.numel(), world, rank)
        elif layout == "rows-zero":     # two halves of the rows, each cut into flat shards over the other ranks
            lanes, lane, share = (2, rank % 2, rank // 2) if value.dim() == 2 else (1, 0, rank)
            if value.dim() == 2:
                offset[0], stop = cut(shape[0], lanes, lane)
                size[0] = stop - offset[0]
            flat = cut(int(torch.Size(size).numel()), world // lanes, share)
        else:
            primary = rank == world - 1
        place = value[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] if size else value
        local = place.clone() if fill else torch.full_like(place, torch.nan)
        offset, size = tuple(offset), tuple(size)
        parts = [(offset, size, local)] if flat is None else flat_parts(
            offset, size, *flat, local.reshape(-1)[flat[0]:flat[1]])
        held.append(LogicalTensor(name, shape, dtype_of(name), parts, primary))
    return held


def equal(held: list[LogicalTensor], values: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(t, values[h.name][tuple(slice(a, a + n) for a, n in zip(o, s, strict=True))])
               for h in held for o, s, t in h.parts)


def save_layout(rank, world, path, layout, step, shapes=SHAPES):
    store.save(Path(path), step, hold(layout, rank, world, truth(shapes), True), {"consumed_samples": 5 * step},
               {"config.yaml": "run: {}\n"}, dist.group.WORLD)


def load_layouts(rank, world, path, layouts, shapes=SHAPES):
    """Load each saved step into every layout; which pairs came back wrong."""
    values, wrong = truth(shapes), []
    for step in store.list_steps(Path(path)):
        for layout in layouts:
            held = hold(layout, rank, world, values, False)
            state = store.load(store.step_path(Path(path), step), held, dist.group.WORLD)
            if state != {"consumed_samples": 5 * step, "step": step} or not equal(held, values):
                wrong.append((step, layout))
    return wrong


LAYOUTS = ["dp", "pp", "rows", "columns", "zero", "rows-zero"]


def test_any_mesh_reads_what_any_mesh_wrote_bit_for_bit(pool, tmp_path):
    for step, layout in enumerate(LAYOUTS):
        pool.run(save_layout, 4 if layout != "zero" else 3, str(tmp_path), layout, step)
    assert pool.run(load_layouts, 2, str(tmp_path), LAYOUTS[:5]) == [[]] * 2
    assert pool.run(load_layouts, 4, str(tmp_path), ["zero", "rows-zero"]) == [[]] * 4
    values = truth(SHAPES)
    for step in store.list_steps(tmp_path):
        alone = hold("dp", 0, 1, values, False)
        store.load(store.step_path(tmp_path, step), alone, None)
        assert equal(alone, values)


def failure(rank, world, work, *args):
    """The message that a rank sees, or None."""
    try:
        work(rank, world, *args)
    except CheckpointError as error:
        return str(error)
    return None


def alike(messages: list) -> str:
    """The message, if all ranks have the same."""
    assert messages[0] and messages == messages[:1] * len(messages)
    return messages[0]


def load_into(rank, world, path, shapes, step=1):
    """Load, and check that a refusal has changed nothing."""
    held = hold("rows", rank, world, truth(shapes), False)
    try:
        store.load(store.step_path(Path(path), step), held, dist.group.WORLD)
    finally:
        assert all(t.isnan().all() for h in held for _, _, t in h.parts)


def without(name: str) -> dict:
    return {n: s for n, s in SHAPES.items() if n != name}


def test_keys_that_do_not_fit_are_refused_by_name_on_all_ranks(pool, tmp_path):
    pool.run(save_layout, 2, str(tmp_path), "rows", 1)
    gone, wq = "weights/layers.0.norm.weight", "weights/layers.0.wq.weight"

    def refusal(shapes):
        return alike(pool.run(failure, 2, load_into, str(tmp_path), shapes))

    assert f"unknown to this model (1): {gone}" in refusal(without(gone))
    assert "missing in the checkpoint (2): weights/layers.1.a, weights/layers.1.b" in refusal(
        {**SHAPES, "weights/layers.1.a": (3,), "weights/layers.1.b": (3,)})
    renamed = refusal({**without(gone), "weights/renamed": (6,)})
    assert "missing in the checkpoint (1): weights/renamed" in renamed and f"(1): {gone}" in renamed
    assert f"{wq} is (8, 6) in the checkpoint, (6, 8) in this model" in refusal({**SHAPES, wq: (6, 8)})


def test_types_are_never_cast_unasked_and_weights_can_be_read_alone(tmp_path):
    values = truth(SHAPES)
    path = store.save(tmp_path, 1, hold("dp", 0, 1, values, True), {}, {}, None)
    target = torch.zeros(13, 6)
    name = "weights/embedding.weight"
    held = [LogicalTensor(name, (13, 6), torch.float32, [((0, 0), (13, 6), target)])]
    only = (name,)
    with pytest.raises(CheckpointError, match=f"{name} is bfloat16 in the checkpoint, float32 here"):
        store.load(path, held, None, only=only)
    store.load(path, held, None, only=only, cast=True)
    assert torch.equal(target, values[name].float())
    assert store.stored_tensors(path)[name] == ((13, 6), torch.bfloat16)


def damage(path: Path, how: str) -> None:
    shard = path / "__1_0.distcp"
    if how == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif how == "missing":
        shard.unlink()
    elif how == "bit":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif how == "state":
        (path / "state.json").write_text((path / "state.json").read_text().replace("5", "6", 1))
    elif how == "manifest":
        (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes()[:-9])
    elif how == "sums":     # a single bit
        (path / "manifest.json").write_text((path / "manifest.json").read_text().replace('"crc32"', '"Crc32"'))
    elif how == "one sum":
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(re.sub(r'("crc32": {\n)[^\n]*\n', r"\1", text))
    elif how == "index":
        (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:-1])


@pytest.mark.parametrize("how, message", [("truncated", "__1_0.distcp has [0-9]+ bytes instead of"),
                                          ("missing", "__1_0.distcp is missing"), ("index", ".metadata has"),
                                          ("bit", "__1_0.distcp has the checksum [0-9a-f]{8} instead of [0-9a-f]{8}"),
                                          ("state", "state.json has the checksum"),
                                          ("sums", "manifest.json is damaged: KeyError: 'crc32'"),
                                          ("one sum", "manifest.json is damaged: it has a size without a checksum"),
                                          ("manifest", "manifest.json cannot be read")])
def test_a_damaged_checkpoint_is_refused_alike(pool, tmp_path, how, message):
    pool.run(save_layout, 2, str(tmp_path), "zero", 1)
    damage(store.step_path(tmp_path, 1), how)

    assert re.search(message, alike(pool.run(failure, 2, load_into, str(tmp_path), SHAPES)))


def break_write(rank, world, path, layout, step):
    """Rank 1 cannot write its shard."""
    if rank == 1:
        from torch.distributed.checkpoint import filesystem
        original = filesystem.FileSystem.create_stream

        def fails(self, name, mode):
            raise OSError(28, "No space left on device")

        filesystem.FileSystem.create_stream = fails
        try:
            save_layout(rank, world, path, layout, step)
        finally:
            filesystem.FileSystem.create_stream = original
    else:
        save_layout(rank, world, path, layout, step)


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_old_one(pool, tmp_path):
    pool.run(save_layout, 2, str(tmp_path), "zero", 1)
    text = alike(pool.run(failure, 2, break_write, str(tmp_path), "zero", 1))
    assert "rank 1" in text and "No space left" in text
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert pool.run(load_layouts, 2, str(tmp_path), ["zero"]) == [[], []]


def hole(rank, world, path):
    held = hold("zero", rank, world, truth(SHAPES), True)
    for tensor in held:
        tensor.primary = rank == 0 or tensor.name != "weights/embedding.weight"
    store.save(Path(path), 1, held, {}, {}, dist.group.WORLD)


def test_a_save_that_misses_elements_is_refused(pool, tmp_path):
    assert "weights/embedding.weight" in alike(pool.run(failure, 2, hole, str(tmp_path)))
    assert not list(tmp_path.iterdir())


def test_an_interrupted_save_is_ignored_and_replaced(tmp_path):
    values = truth(SHAPES)
    held = hold("dp", 0, 1, values, True)
    first = store.save(tmp_path, 2, held, {}, {}, None)
    shutil.copytree(first, tmp_path / "step-00000010.tmp")
    (tmp_path / "step-00000011").mkdir()        # a name without content is no checkpoint either
    assert store.newest(tmp_path) == first and store.find(tmp_path) == first
    assert store.save(tmp_path, 10, held, {}, {}, None) == store.newest(tmp_path) == tmp_path / "step-00000010"
    first.rename(tmp_path / "step-00000002.old")        # a replacement that died between its two renames
    (tmp_path / "step-00000012.tmp").mkdir()
    store.tidy(tmp_path)
    assert store.list_steps(tmp_path) == [2, 10] and not list(tmp_path.glob("*.*"))


def test_a_checkpoint_stands_alone_and_names_no_machine(tmp_path):
    source = tmp_path / "tokenizer.model"
    source.write_bytes(b"\0model")
    path = store.save(tmp_path / "c", 3, hold("dp", 0, 1, truth(SHAPES), True), {"scaler": {"scale": 2.0}},
                      {"config.yaml": "a: 1\n", "tokenizer/tokenizer.model": source}, None)
    assert (path / "tokenizer/tokenizer.model").read_bytes() == b"\0model"
    assert store.read_state(path) == {"scaler": {"scale": 2.0}, "step": 3}
    assert str(tmp_path).encode() not in (path / ".metadata").read_bytes()


class Evil:
    def __reduce__(self):
        return print, ("this must not run",)


def test_an_index_that_names_other_code_is_refused(tmp_path, capfd):
    path = store.save(tmp_path, 1, hold("dp", 0, 1, truth(SHAPES), True), {}, {}, None)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][".metadata"] = (path / ".metadata").stat().st_size
    manifest["crc32"][".metadata"] = f"{crc32(path / '.metadata'):08x}"
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="builtins.print, which no index of tensors holds"):
        store.load(path, hold("dp", 0, 1, truth(SHAPES), False), None)
    assert "must not run" not in capfd.readouterr().out


class ByName:
    """Pickles as Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""

    def __init__(self, owner, name):
        self.made = owner, name

    def __reduce__(self):
        return getattr, self.made


def test_an_enumeration_is_read_however_python_pickles_it_and_nothing_else_by_name(tmp_path):
    formats = metadata._MEMORY_FORMATS
    for member in formats:
        for form in (member, ByName(formats, member.name)):
            read = metadata._IndexUnpickler(io.BytesIO(pickle.dumps(form))).load()
            assert read is member
    for owner, name in ((formats, "__class__"), (torch.Size, "__subclasses__"), (metadata.Metadata, "__init__")):
        with pytest.raises(pickle.UnpicklingError, match=f"it asks for {name} of .*, which no index of tensors holds"):
            metadata._IndexUnpickler(io.BytesIO(pickle.dumps(ByName(owner, name)))).load()


def test_a_shard_that_names_other_code_is_refused(tmp_path, capfd):
    path = store.save(tmp_path, 1, hold("dp", 0, 1, truth({"weights/a": (2,)}), True), {}, {}, None)
    shard = path / "__0_0.distcp"
    stream = io.BytesIO()
    torch.save(Evil(), stream, _use_new_zipfile_serialization=False)    # bytes after it do no harm
    evil = stream.getvalue()
    shard.write_bytes(evil + bytes(max(0, shard.stat().st_size - len(evil))))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][shard.name], manifest["crc32"][shard.name] = shard.stat().st_size, f"{crc32(shard):08x}"
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="Weights only load failed"):
        store.load(path, hold("dp", 0, 1, truth({"weights/a": (2,)}), False), None)
    assert "must not run" not in capfd.readouterr().out


def test_another_format_is_refused(tmp_path):
    fake(tmp_path, 1)
    manifest = folder.step_path(tmp_path, 1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="has format 2; this version reads format 1"):
        store.load(folder.step_path(tmp_path, 1), [], None)


def fake(path: Path, *steps: int) -> None:
    for step in steps:
        where = folder.step_path(path, step)
        where.mkdir(parents=True)
        (where / "data").write_text("1234")
        (where / "manifest.json").write_text(json.dumps(
            {"format": 1, "files": {"data": 4}, "crc32": {"data": f"{zlib.crc32(b'1234'):08x}"}}))


def test_newest_is_by_number_and_pruning_keeps_what_it_should(tmp_path):
    fake(tmp_path, 99999990, 100000000, 5, 10, 20, 30)
    assert store.newest(tmp_path).name == "step-100000000"
    store.prune(tmp_path, keep=2, keep_every=10)
    assert store.list_steps(tmp_path) == [10, 20, 30, 99999990, 100000000]
    store.prune(tmp_path, keep=2)
    assert store.list_steps(tmp_path) == [99999990, 100000000]
    for step in (99999990, 100000000):
        shutil.rmtree(folder.step_path(tmp_path, step))


def test_pruning_never_removes_the_newest_whole_one(tmp_path):
    fake(tmp_path, 1, 2, 3, 4)
    for step in (3, 4):
        (folder.step_path(tmp_path, step) / "data").write_text("123")
    store.prune(tmp_path, keep=1)
    assert store.list_steps(tmp_path) == [2, 4]


def test_later_checkpoints_are_set_aside(tmp_path):
    fake(tmp_path, 1, 2, 3)
    folder.set_aside(tmp_path, 1)
    fake(tmp_path, 2)
    folder.set_aside(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000001", "step-00000002.2.abandoned", "step-00000002.abandoned", "step-00000003.abandoned"]


def shared(rank, world, path, other):
    folder.check_shared(
        Path(path if rank == 0 or not other else other), dist.group.WORLD, wait=0.3)


def test_a_folder_that_is_not_shared_is_refused(pool, tmp_path):
    pool.run(shared, 2, str(tmp_path), "")
    (tmp_path / "b").mkdir()
    text = alike(pool.run(failure, 2, shared, str(tmp_path / "a"), str(tmp_path / "b")))
    assert "must be shared by all nodes" in text and "rank 1 on" in text
    assert not list((tmp_path / "a").iterdir())
