import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trainer.checkpoint.local_part import (
    Header,
    digest_of,
    host_copies,
    layout_of,
    read_header,
    read_part,
    size_of,
    verify_part,
    write_part,
)
from trainer.checkpoint.local_transfer import PartServer, fetch_part
from trainer.checkpoint.manifest import DamagedError


@pytest.fixture
def arrays():
    """Sharded, replicated, of several dtypes, and a scalar."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    values = {
        "w": (np.arange(96, dtype=np.float32).reshape(8, 12), ("a", "b")),
        "half": (np.linspace(-1, 1, 16).astype(jnp.bfloat16), ("b",)),
        "codes": (np.arange(8, dtype=np.uint8), ()),
        "count": (np.int32(7), ()),
    }
    return {
        name: jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))
        for name, (value, spec) in values.items()
    }


@pytest.fixture
def part(arrays, tmp_path):
    header = Header("run", "runs/x", "start", 40, 2, 4, "a 2", layout_of(arrays), {"step": 40})
    path = tmp_path / "step_40.part_2"
    write_part(path, header, host_copies(arrays))
    return path, header


def test_every_bit_comes_back_on_the_same_shards(arrays, part):
    path, header = part
    assert verify_part(path) == read_header(path) == header
    # A replicated shard is written once.
    assert size_of(header.layout) == sum(x.nbytes for x in arrays.values())
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    restored = read_part(path, arrays)
    for name, x in arrays.items():
        assert restored[name].sharding == x.sharding and restored[name].dtype == x.dtype
        assert np.asarray(restored[name]).tobytes() == np.asarray(x).tobytes()


def test_a_copy_does_not_change_with_the_array(arrays):
    copies = list(host_copies({"w": arrays["w"]}))
    before = [copy.tobytes() for copy in copies]
    jax.jit(lambda x: x * 2, donate_argnums=0)(arrays["w"]).block_until_ready()
    assert [copy.tobytes() for copy in copies] == before


def test_the_layout_distinguishes_shardings_of_the_same_array(arrays):
    other = jax.device_put(
        np.asarray(arrays["w"]), NamedSharding(arrays["w"].sharding.mesh, PartitionSpec("b", "a"))
    )
    assert digest_of(layout_of({"w": other})) != digest_of(layout_of({"w": arrays["w"]}))
    abstract = jax.ShapeDtypeStruct((8, 12), jnp.float32, sharding=other.sharding)
    assert layout_of({"w": abstract}) == layout_of({"w": other})


def test_a_flipped_bit_or_a_truncation_is_found(part):
    path, _ = part
    whole = path.read_bytes()
    for offset in (3, 20, len(whole) // 2, len(whole) - 1):
        changed = bytearray(whole)
        changed[offset] ^= 1
        path.write_bytes(changed)
        with pytest.raises(DamagedError, match=r"step_40\.part_2"):
            verify_part(path)
    for content in (whole[:-1], whole[:100], b"", b"no part at all" * 9):
        path.write_bytes(content)
        with pytest.raises(DamagedError, match=r"step_40\.part_2"):
            verify_part(path)
    with pytest.raises(DamagedError, match="not a part of a local checkpoint"):
        read_header(path)


def test_a_part_that_cannot_be_written_leaves_nothing(arrays, tmp_path):
    header = Header("run", "runs/x", "start", 40, 2, 4, "a 2", layout_of(arrays), {"step": 40})

    def full():
        yield np.zeros(3)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_part(tmp_path / "step_40.part_2", header, full())
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def server(part):
    path, _ = part
    server = PartServer("127.0.0.1", "secret", {"mine": path, "gone": path.with_name("x")}.get)
    yield ("127.0.0.1", server.port)
    server.close()


def test_another_process_gets_the_same_file(part, server, tmp_path):
    path, header = part
    target = tmp_path / "copy"
    assert fetch_part(server, "secret", "mine", target) == header
    assert target.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("secret", "name"), [("guessed", "mine"), ("secret", "../secret"), ("secret", "gone")]
)
def test_strangers_and_unknown_parts_get_nothing(server, tmp_path, secret, name):
    target = tmp_path / "copy"
    with pytest.raises(OSError, match="does not have"):
        fetch_part(server, secret, name, target)
    assert not target.exists() and not list(tmp_path.glob("*.tmp"))


def test_a_damaged_part_is_not_taken_from_another_host(part, server, tmp_path):
    path, _ = part
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    target = tmp_path / "copy"
    with pytest.raises(DamagedError):
        fetch_part(server, "secret", "mine", target)
    assert not target.exists() and not list(tmp_path.glob("*.tmp"))
