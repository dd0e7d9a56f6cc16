"""Any trainer layout to any worker layout gives the trainer's bits."""

import math
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from elastic.system.host import Host, on
from elastic.weights.directory import DirectoryRelay
from elastic.weights.encoder import PART_TIMEOUT_S
from elastic.weights.errors import WeightsCorrupted
from elastic.weights.placements import Placement, declared, inferred
from elastic.weights.publisher import Publisher, TrainerRank
from elastic.weights.puller import Puller
from elastic.weights.records import NOTHING, SCHEMA_VERSION, DeltaPart, part_key
from elastic.weights.sharding import Box, LocalTensor, Shard, breaks, cells, needed, owned, whole
from elastic.weights.versions import published_updates, published_versions
from tests.seeds import examples
from tests.weights.ranks import (
    HEAD,
    HIDDEN,
    Trainer,
    assert_has,
    local_shapes,
    local_tensors,
    meshes_of,
    qwen3_layout,
    qwen3_shapes,
    randomly_patterned,
)
from tests.weights.signed import KEY, TRUST, assert_same, overwrite

many = settings(deadline=None, max_examples=examples(3, 6), suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def meshes(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]]) -> list[Shard]:
    """Declared placements on a random mesh: every tensor split or replicated along each of its dimensions."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    dimensions = {
        name: tuple(draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh) for name, shape in shapes.items()
    }
    return [
        declared(shapes, {name: Placement(mesh, at, split) for name, split in dimensions.items()})
        for at in product(*map(range, mesh))
    ]


@st.composite
def layouts(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]]) -> list[Shard]:
    kind = draw(st.sampled_from(["whole", "mesh", "qwen3"]))
    if kind == "mesh":
        return draw(meshes(shapes))
    if kind == "whole" or "model.embed_tokens.weight" not in shapes:
        return [whole(shapes)] * draw(st.integers(1, 3))
    return qwen3_layout(shapes, draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3)), draw(st.booleans()))


models = st.booleans().map(qwen3_shapes) | st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1
)


@pytest.mark.slow
@many
@given(data=st.data(), shapes=models, seed=st.integers(0, 2**30))
def test_any_trainer_layout_to_any_worker_layout(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shapes, seed: int
):
    """A property over layouts: each example publishes and pulls whole versions."""
    trainer, planned, unplanned = (data.draw(layouts(shapes)) for _ in range(3))
    relay = DirectoryRelay(tmp_path_factory.mktemp("relay"))
    # Those that no engine fuses with others.
    float32 = data.draw(st.sampled_from([(), list(shapes), [n for n in shapes if "norm" in n or n == "b"]]))
    ranks = Trainer(relay, shapes, trainer, planned, float32)
    workers = [(shard, Puller(relay, TRUST, shard=shard)) for shard in (*planned, *unplanned)]
    full = randomly_patterned(shapes, seed, float32)
    for version in range(3):
        if version:
            moved = randomly_patterned(shapes, seed + version, float32)
            full = {n: torch.where(moved[n] % 9 == 0, moved[n], tensor) for n, tensor in full.items()}
        ranks.publish(version, full)
        for shard, puller in workers:
            if version == 2 or data.draw(st.booleans()):
                assert_has(puller, shard, version, full)
    ranks.close()


@given(data=st.data(), shapes=models)
@settings(deadline=None, max_examples=examples(10, 25))
def test_cells_are_the_common_refinement(data: st.DataObject, shapes):
    trainer, workers = data.draw(layouts(shapes)), data.draw(layouts(shapes))
    found = cells(shapes, trainer, workers)
    assert sum(cell.box.elements for cell in found) == sum(math.prod(shape) for shape in shapes.values())
    assert [cell.owner for cell in found] == sorted(cell.owner for cell in found)
    for cell in found:
        for shard in (*trainer, *workers):
            for box in (box for local in shard.values() for box in local.boxes):
                assert cell.box.overlap(box) in (None, cell.box), "a rank holds a part of a cell"
    for rank, shard in enumerate(trainer):
        needs = needed([cell.box for cell in found], shard)
        assert all(needs[number] for number in owned(found, rank))
    for at, (cell, after) in enumerate(pairwise(found)):
        assert (at + 1 in breaks(found)) == ((cell.owner, cell.audience) != (after.owner, after.audience))


def test_data_parallel_ranks_publish_disjoint_shares_of_about_the_same_size():
    shapes = {f"layers.{n}": (10, 10) for n in range(40)}
    found = cells(shapes, [whole(shapes)] * 4)
    assert [sum(found[n].box.elements for n in owned(found, rank)) for rank in range(4)] == [1000] * 4


def test_a_worker_pulls_what_it_hosts_and_little_more(tmp_path: Path):
    shapes = qwen3_shapes()
    relay = DirectoryRelay(tmp_path)
    layout = qwen3_layout(shapes, tp=2, stages=1, fused=True)
    ranks = Trainer(relay, shapes, [whole(shapes)] * 2, layout, bucket_elements=1000)
    ranks.publish(0, randomly_patterned(shapes, 0))
    sizes = [Puller(relay, TRUST, shard=shard).stage(0).report.size_bytes for shard in layout]
    puller = Puller(relay, TRUST)
    everything = puller.stage(0)
    assert max(sizes) < 0.65 * everything.report.size_bytes
    assert puller.apply(everything).keys() == {cell.box.tensor for cell in ranks.cells}
    ranks.close()


def test_ranks_agree_when_a_keyframe_is_due(tmp_path: Path):
    """The first rank says so, on the relay."""
    shapes = qwen3_shapes()
    relay = DirectoryRelay(tmp_path)
    layout = qwen3_layout(shapes, tp=2, stages=1, fused=False)
    ranks = Trainer(relay, shapes, layout, [], keyframe_every=2, merge_every=1)
    for version in range(4):
        ranks.publish(version, randomly_patterned(shapes, version))
        keyframes = {update.version for update in published_updates(relay) if update.base is None}
        assert keyframes == set(range(0, version + 1, 2))
    ranks.close()


@pytest.mark.parametrize("size", [1, 2])
def test_float32_tensors_travel_in_cells_too(tmp_path: Path, size: int):
    shapes = {"a": (5, 3), "b": (7,), "c": (3, 3)}
    relay = DirectoryRelay(tmp_path)
    ranks = Trainer(relay, shapes, meshes_of(shapes, 2), [], float32=["b", "c"])
    workers = [(shard, Puller(relay, TRUST, shard=shard)) for shard in meshes_of(shapes, size)]
    for version in range(3):
        full = randomly_patterned(shapes, version, ["b", "c"])
        ranks.publish(version, full)
        for shard, puller in workers:
            assert_has(puller, shard, version, full)
    with pytest.raises(ValueError, match=r"tensor b: dtype torch.bfloat16; its share says float32"):
        ranks.publish(3, randomly_patterned(shapes, 3))
    ranks.close()


def test_what_is_fused_of_both_types_is_float32(tmp_path: Path):
    relay = DirectoryRelay(tmp_path)
    full = {"a": torch.tensor([1.5, 2.0]).bfloat16(), "b": torch.tensor([torch.pi])}
    Publisher(relay, "run", {}, key=KEY).publish(0, full)
    boxes = Box("a", (0,), (2,)), Box("b", (0,), (1,))
    found = Puller(relay, TRUST, shard={"ab": LocalTensor((3,), boxes)}).pull(0)
    assert_same(found, {"ab": torch.tensor([1.5, 2.0, torch.pi])})


@pytest.mark.parametrize(
    "change",
    [
        {"run": "another"},
        {"version": 7},
        {"base_version": 3},
        {"rank": 0},
        {"layout": "of another model"},
        {"base_state": "of other weights"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_part_that_belongs_elsewhere_is_refused(tmp_path: Path, change: dict[str, object]):
    shapes = {"a": (40,), "b": (30,)}
    relay = DirectoryRelay(tmp_path)
    ranks = Trainer(relay, shapes, [whole(shapes)] * 2, [])
    full = randomly_patterned(shapes, 0)
    ranks.publish(0, full)
    moved = randomly_patterned(shapes, 1)
    first, second = ranks.publishers
    second.publish(1, local_tensors(moved, whole(shapes)))
    key = part_key(1, 0, 1)
    part = TRUST.open(relay.get(key), DeltaPart, SCHEMA_VERSION)
    overwrite(relay, key, KEY.seal(replace(part, of=replace(part.of, **change))))
    with pytest.raises(WeightsCorrupted, match=f"part.* its {next(iter(change))} is|part: it is of run another"):
        first.publish(1, local_tensors(moved, whole(shapes)))
    assert published_versions(relay) == [0]
    overwrite(relay, key, KEY.seal(part))
    first.publish(1, local_tensors(moved, whole(shapes)))
    assert_has(Puller(relay, TRUST, shard=whole(shapes)), whole(shapes), 1, moved)
    ranks.close()


def test_a_part_without_some_of_its_buckets_is_refused(tmp_path: Path):
    shapes = {"a": (400,)}
    relay = DirectoryRelay(tmp_path)
    ranks = Trainer(relay, shapes, meshes_of(shapes, 2), [])
    full = randomly_patterned(shapes, 0)
    ranks.publishers[1].publish(0, local_tensors(full, ranks.layout[1]))
    key = part_key(0, NOTHING, 1)
    part = TRUST.open(relay.get(key), DeltaPart, SCHEMA_VERSION)
    overwrite(relay, key, KEY.seal(replace(part, buckets=part.buckets[1:])))
    with pytest.raises(WeightsCorrupted, match="its buckets are not those of the rank"):
        ranks.publishers[0].publish(0, local_tensors(full, ranks.layout[0]))
    ranks.close()


def test_a_version_without_a_ranks_part_is_not_there(tmp_path: Path):
    now_s = [0.0]

    def sleep(pause_s: float) -> None:
        now_s[0] += pause_s

    shapes = {"a": (4,), "b": (4,)}
    relay = DirectoryRelay(tmp_path)
    share = TrainerRank(cells(shapes, [whole(shapes)] * 2), whole(shapes), rank=0, ranks=2)
    patient = on(Host(monotonic=lambda: now_s[0], sleep=sleep))
    with patient, pytest.raises(Exception, match="part-00001"):
        Publisher(relay, "run", {}, share=share, key=KEY).publish(
            0, {n: torch.ones(4, dtype=torch.bfloat16) for n in shapes}
        )
    assert now_s[0] > 0.9 * PART_TIMEOUT_S
    with pytest.raises(Exception, match="not published"):
        Puller(relay, TRUST).pull(0)


NAME = "model.layers.0.self_attn."


@pytest.mark.parametrize(("rank", "rows"), [(0, (0, 2)), (1, (0, 2)), (2, (2, 4)), (3, (2, 4))])
def test_few_key_heads_are_replicated_on_neighbours(rank: int, rows: tuple[int, int]):
    shard = inferred(qwen3_shapes(), {NAME + "k_proj.weight": (HEAD, HIDDEN)}, rank, 4)
    (box,) = shard[NAME + "k_proj.weight"].boxes
    assert (box.begin[0], box.end[0]) == rows


def test_a_fused_tensor_is_three_boxes_and_the_vocabulary_is_padded():
    local = {NAME + "qkv_proj.weight": (8, HIDDEN), "lm_head.weight": (4, HIDDEN)}
    shard = inferred(qwen3_shapes(), local, 3, 4)
    assert shard[NAME + "qkv_proj.weight"].boxes == (
        Box(NAME + "q_proj.weight", (12, 0), (16, HIDDEN)),
        Box(NAME + "k_proj.weight", (2, 0), (4, HIDDEN)),
        Box(NAME + "v_proj.weight", (2, 0), (4, HIDDEN)),
    )
    assert shard["lm_head.weight"] == LocalTensor((4, HIDDEN), (Box("lm_head.weight", (12, 0), (13, HIDDEN)),)), (
        "three rows of the last rank are padding"
    )


@pytest.mark.parametrize(
    ("local", "problem"),
    [
        ({"lm_head.bias": (3,)}, "not in the model"),
        ({NAME + "o_proj.weight": (3, 16)}, "no known way to split"),
        ({NAME + "o_proj.weight": (6, 7)}, "3 parts of 7 of 16 do not fit 2 ranks"),
        ({NAME + "q_norm.weight": (1,)}, "no known way to split"),
        ({NAME + "qkv_proj.weight": (13, HIDDEN)}, "13 rows cannot be"),
        ({"model.layers.0.mlp.gate_up_proj.weight": (13, HIDDEN)}, "13 rows cannot be"),
    ],
)
def test_a_shape_that_cannot_be_explained_is_refused(local, problem: str):
    with pytest.raises(ValueError, match=problem):
        inferred(qwen3_shapes(), local, 0, 2)


def test_placements_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="differ in length"):
        Placement((2,), (0, 0), (0,)).box("a", (4,))
    with pytest.raises(ValueError, match="not on a mesh"):
        Placement((2,), (2,), (0,)).box("a", (4,))
    with pytest.raises(ValueError, match="dimension 1"):
        Placement((2,), (0,), (1,)).box("a", (4,))
    with pytest.raises(ValueError, match="no trainer rank holds"):
        cells({"a": (4,)}, [declared({"a": (4,)}, {"a": Placement((2,), (0,), (0,))})])
    with pytest.raises(ValueError, match="not within"):
        cells({"a": (4,)}, [whole({"a": (5,)})])


@pytest.mark.parametrize("in_cells", [True, False])
def test_a_version_that_lacks_what_is_hosted_is_refused(tmp_path: Path, in_cells: bool):
    shapes = {"a": (4,), "b": (2, 3)}
    relay = DirectoryRelay(tmp_path)
    full = randomly_patterned(shapes, 0)
    if in_cells:
        ranks = Trainer(relay, shapes, meshes_of(shapes, 2), [])
        ranks.publish(0, full)
        ranks.close()
    else:
        Publisher(relay, "run", {}, key=KEY).publish(0, local_tensors(full, whole(shapes)))
    for more, problem in (
        ({"lm_head.weight": (3,)}, "lm_head.weight: .* 3 of them"),
        ({"b": (2, 4)}, "b: .* 2 of them"),
    ):
        with pytest.raises(WeightsCorrupted, match=problem):
            Puller(relay, TRUST, shard=whole(shapes | more)).pull(0)
    assert_has(Puller(relay, TRUST, shard=whole({"b": (2, 3)})), whole({"b": (2, 3)}), 0, full)


def test_who_has_no_shard_gets_whole_tensors_of_ranks_that_split_them(tmp_path: Path):
    shapes = {"a": (5,), "b": (2, 3), "c": ()}
    relay = DirectoryRelay(tmp_path)
    layout = [
        declared(shapes, {n: Placement((2,), (at,), (0 if s else None,)) for n, s in shapes.items()}) for at in (0, 1)
    ]
    ranks = Trainer(relay, shapes, layout, [])
    puller = Puller(relay, TRUST)
    for version in range(2):
        full = randomly_patterned(shapes, version)
        ranks.publish(version, full)
        assert_has(puller, whole(shapes), version, full)
    ranks.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_changes_of_cells_are_by_a_ranks_own_tensors(tmp_path: Path, size: int):
    """However ranks that split tensors publish them, and however the worker's split them, foreseen or not."""
    shapes = qwen3_shapes()
    relay = DirectoryRelay(tmp_path)
    ranks = Trainer(relay, shapes, meshes_of(shapes, 2), meshes_of(shapes, 1), merge_every=1, bucket_elements=1000)
    workers = [(shard, Puller(relay, TRUST, shard=shard)) for shard in meshes_of(shapes, size)]
    full, live = randomly_patterned(shapes, 0), [{} for _ in workers]
    for version in range(3):
        if version:
            full = {name: content.clone() for name, content in full.items()}
            for content in full.values():
                content.view(-1)[version::20] += 1
        ranks.publish(version, full)
        for (shard, puller), tensors in zip(workers, live, strict=True):
            staged = puller.stage(version)
            changes = puller.changes(staged)
            if not version:
                tensors.update({name: tensor.clone() for name, tensor in puller.apply(staged).items()})
                continue
            assert changes is not None
            for name, index, values in changes.elements:
                tensors[name].view(-1)[index] = values
            assert_has(puller, shard, version, full)
            assert_same(tensors, puller.pull(version))
    ranks.close()


def test_declared_placements_and_the_shapes_say_the_same():
    shapes = qwen3_shapes()
    by_columns, whole_everywhere = ("o_proj", "down_proj"), ("layernorm", "norm")
    for rank in range(2):
        placements = {
            name: Placement((2,), (rank,), (None if module.endswith(whole_everywhere) else int(module in by_columns),))
            for name in shapes
            for module in (name.split(".")[-2],)
        }
        from_shapes = inferred(shapes, local_shapes(shapes, 2, 1, 0, fused=False), rank, 2)
        said = declared(shapes, placements)
        assert {n: t.boxes for n, t in said.items()} == {n: t.boxes for n, t in from_shapes.items()}
