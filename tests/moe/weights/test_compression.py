"""Test the compression of experts that a domain gathers.

The tests cover which entries are chosen, which bytes are sent, and what receivers
decode. The domain has 2 x 2 devices on the axes (dc, expert); the data axis is not part
of it.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.axes import make_mesh
from moejax.moe.weights import compression
from moejax.plan.layout import Topology
from tests.support.close import assert_close

DOMAIN, OWN, SIZE, BLOCKS = ("dc", "expert"), 3, 48, 4
MEMBERS = 4
ALL = OWN * MEMBERS
ROWS = P(("dc", "data", "expert"))
COMMUNICATION = ["float8_e5m2", "bfloat16", "float32"]

encode = jax.jit(compression.encode, static_argnums=(2, 3, 4))
decode = jax.jit(compression.decode)


def on_devices(body, in_specs, out_specs):
    """Return a jitted function that runs `body` on each of the eight devices."""
    mesh = make_mesh(Topology(dc=2, data=2, expert=2))
    run = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(run)


def weights(seed, num=ALL, size=SIZE):
    """Return random weights of `num` experts, float32 [num, size]."""
    return np.random.default_rng(seed).normal(size=(num, size)).astype(np.float32)


@pytest.mark.parametrize("blocks", [1, BLOCKS])
def test_the_largest_differences_of_each_block_are_sent(blocks):
    target_ex, base_ex, k = weights(0), weights(1), 8
    target_ex[0], base_ex[0] = 1, 0  # all differences are equal: the first are taken
    packed = encode(target_ex, base_ex, k, "float32", blocks)
    difference_ebx = np.abs(target_ex - base_ex).reshape(ALL, blocks, -1)
    order_ebx = np.argsort(-difference_ebx, axis=-1, kind="stable")
    in_block_ebk = order_ebx[..., : k // blocks]
    index_ek = in_block_ebk + np.arange(blocks)[:, None] * (SIZE // blocks)
    assert np.array_equal(packed.index_ek, index_ek.reshape(ALL, k))
    decoded_ex = decode(base_ex, packed)
    tail_ebx = np.sort(difference_ebx, axis=-1)[..., : (SIZE - k) // blocks]
    error_e = np.linalg.norm(target_ex - decoded_ex, axis=1)
    assert_close(error_e, np.linalg.norm(tail_ebx, axis=(1, 2)))


@pytest.mark.parametrize("value_dtype", COMMUNICATION)
def test_all_entries_are_the_target(value_dtype):
    """With all entries sent and a base of zeros, a receiver decodes the target, rounded
    to the dtype that is sent."""
    target_ex, zeros_1x = weights(0), jnp.zeros((1, SIZE))
    packed = encode(target_ex, zeros_1x, SIZE, value_dtype)
    expected_ex = jnp.asarray(target_ex).astype(value_dtype).astype(jnp.float32)
    assert np.array_equal(decode(zeros_1x, packed), expected_ex)


@pytest.mark.parametrize("size", [98304, 3 * 512 * 2048, 7 * 11 * 13])
@pytest.mark.parametrize("ratio", [1, 10.5, 50])
def test_entries_are_the_most_that_fit(size, ratio):
    widths = value_bytes, index_bytes, weight_bytes = 2, 2, 4
    blocks = compression.num_blocks(size, 4096)
    assert size % blocks == 0
    assert size // blocks <= 4096
    for count in (1, blocks):
        k = compression.num_entries(size, ratio, *widths, blocks=count)
        entry_bytes, fits = value_bytes + index_bytes, size * weight_bytes / ratio
        assert k % count == 0
        assert k * entry_bytes <= fits < (k + count) * entry_bytes or k == size
    with pytest.raises(ValueError, match="use at most ratio=48"):
        compression.num_entries(48, 50, *widths)


@pytest.mark.parametrize(
    ("value_dtype", "size", "blocks", "index_bytes"),
    [
        ("float32", SIZE, 1, 1),
        ("bfloat16", 512, 2, 1),
        ("float8_e5m2", 2**16, 1, 2),
        ("float8_e5m2", 2**16 + 2, 1, 4),
        ("bfloat16", 2**16 + 2, 2, 2),
    ],
)
def test_a_message_has_the_size_that_wire_bytes_returns(
    value_dtype, size, blocks, index_bytes
):
    """Values and indices survive packing, and the message has the computed size.
    Indices take two bytes also if they are 2 ** 15 or more."""
    num, k, itemsize = 2, 8, jnp.dtype(value_dtype).itemsize
    base_ex = np.zeros((num, size), np.float32)
    target_ex = base_ex.copy()
    target_ex[:, [*range(0, size, size // 7), size - 1]] = 1.5
    packed = encode(target_ex, base_ex, k, value_dtype, blocks)
    words = compression.to_words(packed, size)
    assert compression.index_bytes(size, blocks) == index_bytes
    assert words.nbytes == compression.wire_bytes(num, k, itemsize, index_bytes)
    back = compression.from_words(words, packed.value_ek.dtype, size, blocks)
    assert np.array_equal(back.value_ek, packed.value_ek)
    assert np.array_equal(back.index_ek, packed.index_ek)


def test_experts_are_the_same_again():
    into_ed2f = np.arange(60.0).reshape(2, 5, 2, 3)
    down_efd = np.arange(30.0).reshape(2, 3, 5)
    back = compression.unflatten(
        compression.flatten({"into": into_ed2f, "down": down_efd}), 5
    )
    assert np.array_equal(back["into"], into_ed2f)
    assert np.array_equal(back["down"], down_efd)


@pytest.mark.parametrize(
    ("value_dtype", "base_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_sender_and_receiver_track_the_same(value_dtype, base_dtype):
    """Over 12 steps of changing weights, every member tracks the same bits as the
    owner, who never receives anything.

    A third computation without a compiled loop gives the same bits, so that they do not
    depend on how a program is compiled.
    """
    k, steps = 8, 12

    def body(w_tex, base_sx):
        first = OWN * jax.lax.axis_index(DOMAIN)
        own_ex = jax.lax.dynamic_slice_in_dim(base_sx, first, OWN)

        def step(carry, w_ex):
            base_sx, own_ex = carry
            packed = compression.encode(w_ex, own_ex, k, value_dtype, BLOCKS)
            own_ex = compression.decode(own_ex, packed)
            return (compression.receive(packed, base_sx, DOMAIN), own_ex), None

        return jax.lax.scan(step, (base_sx, own_ex), w_tex)[0]

    step_sx = 0.1 * np.random.default_rng(0).normal(size=(steps, ALL, SIZE))
    w_tsx = np.cumsum(step_sx, axis=0).astype(np.float32)
    zeros_sx = jnp.zeros((ALL, SIZE), base_dtype)
    run = on_devices(body, (P(None, DOMAIN), P()), (P(), P(DOMAIN)))
    tracked_sx, own_sx = run(w_tsx, zeros_sx)
    shards = [np.asarray(shard.data) for shard in tracked_sx.addressable_shards]
    assert len(shards) == 8
    assert all(np.array_equal(shard, own_sx) for shard in shards)
    base_sx = zeros_sx
    for w_sx in w_tsx:  # one operation at a time, so that none are fused
        packed = compression.encode(w_sx, base_sx, k, value_dtype, BLOCKS)
        base_sx = compression.decode(base_sx, packed)
    assert np.array_equal(own_sx, base_sx)
    error, total = np.abs(w_tsx[-1] - own_sx).sum(), np.abs(w_tsx[-1]).sum()
    assert error < total / 2  # the tracked weights follow


def test_constant_weights_are_reached():
    """The tracked weights equal constant weights after ceil(size / k) steps, if values
    are sent in float32. After twice as many, a bfloat16 base equals the weights rounded
    to bfloat16."""
    k, size = 7, SIZE
    whole_ex = np.random.default_rng(0).integers(-9, 9, (ALL, size)).astype(np.float32)
    w_ex, zeros_ex = weights(0), np.zeros((ALL, size), np.float32)

    def track(steps, w_ex, base_ex, value_dtype):
        for _ in range(steps):
            packed = encode(w_ex, base_ex, k, value_dtype)
            base_ex = decode(base_ex, packed)
        return base_ex

    sweep = -(-size // k)
    assert np.array_equal(track(sweep, whole_ex, zeros_ex, "float32"), whole_ex)
    assert not np.array_equal(track(sweep - 1, whole_ex, zeros_ex, "float32"), whole_ex)
    rounded_ex = track(2 * sweep, w_ex, zeros_ex.astype(jnp.bfloat16), "bfloat16")
    assert np.array_equal(rounded_ex, w_ex.astype(jnp.bfloat16))


def total_loss(w_sx, x_nx):
    """Return the sum over all devices of a loss of each device's own rows x and all
    experts of the domain."""
    y_ns = jnp.tanh(x_nx @ w_sx.T)
    return jax.lax.psum(jnp.sum(y_ns**2), ("dc", "data", "expert"))


def gather_compressed(own_ex, packed, base_sx):
    """Return the experts of all members: this device's own, and the others decoded."""
    tracked_sx = compression.receive(packed, base_sx, DOMAIN)
    return compression.insert_own(own_ex, tracked_sx, DOMAIN)


def gather_all(own_ex):
    """Return the experts of all members of the domain, without compression."""
    own_ex = jax.lax.pcast(own_ex, "data", to="varying")
    return jax.lax.all_gather(own_ex, DOMAIN, tiled=True)


def test_the_gradient_is_that_of_an_all_gather():
    """The gradient of compressed experts is that of a plain all_gather.

    If the tracked experts equal the weights, the gathered values are equal bit for bit.
    Otherwise a device's own experts are exact and the others are decoded ones. Base and
    entries have no gradient.
    """
    w_sx, x_nx, k = weights(0), weights(1, 16), 8

    def run(own_ex, packed, base_sx, x_nx):
        def compressed(own_ex, base_sx, value_ek):
            entries = packed.replace(value_ek=value_ek)
            held_sx = gather_compressed(own_ex, entries, base_sx)
            return total_loss(held_sx, x_nx), held_sx

        args = (own_ex, base_sx, packed.value_ek)
        grads, held_sx = jax.grad(compressed, (0, 1, 2), has_aux=True)(*args)
        expected = jax.grad(lambda own_ex: total_loss(gather_all(own_ex), x_nx))
        return *grads, held_sx[None], expected(own_ex)

    shard = P(DOMAIN)
    step = on_devices(run, (shard, shard, P(), ROWS), (shard, P(), shard, shard, shard))
    packed = encode(w_sx, w_sx, k, "float32", BLOCKS)
    grad_sx, d_base, d_value, held_wsx, expected_sx = step(w_sx, packed, w_sx, x_nx)
    assert np.array_equal(held_wsx, np.broadcast_to(w_sx, (MEMBERS, ALL, SIZE)))
    assert_close(grad_sx, expected_sx)
    assert not np.any(d_base)
    assert not np.any(d_value)

    base_sx = weights(2)
    packed = encode(w_sx, base_sx, k, "float32", BLOCKS)
    tracked_sx = decode(base_sx, packed)
    held_wsx = step(w_sx, packed, base_sx, x_nx)[3]
    for member, held_sx in enumerate(held_wsx):
        expected_sx = np.array(tracked_sx)
        own = np.arange(OWN) + member * OWN
        expected_sx[own] = w_sx[own]
        assert np.array_equal(held_sx, expected_sx)


def test_one_buffer_is_gathered_along_each_axis():
    """Each sender's buffer has exactly `wire_bytes` bytes; gradients return by
    reduce-scatter alone."""
    k, shard = 8, P(DOMAIN)

    def run(own_ex, packed, base_1x, d_sx):
        own_ex = jax.lax.pcast(own_ex, "data", to="varying")
        held_sx, pull = jax.vjp(
            lambda own: gather_compressed(own, packed, base_1x), own_ex
        )
        return held_sx, pull(d_sx)[0]

    step = on_devices(run, (shard, shard, P(), ROWS), (ROWS, ROWS))
    w_sx, base_1x = weights(0), weights(3, 1)
    packed = encode(w_sx, base_1x, k, "bfloat16", BLOCKS)
    lowered = step.lower(w_sx, packed, base_1x, weights(4, 8 * ALL))
    text = lowered.compile().as_text()
    kinds = r"= (\w+)\[([\d,]*)\]\S* (all-\w+|reduce-scatter|collective\S*)\("
    sent = [
        (kind, dtype, int(np.prod([int(n) for n in dims.split(",")])))
        for dtype, dims, kind in re.findall(kinds, text)
    ]
    words = compression.wire_bytes(OWN, k, 2, compression.index_bytes(SIZE, BLOCKS))
    assert sorted(sent) == [
        ("all-gather", "u8", 2 * words),
        ("all-gather", "u8", 4 * words),
        ("reduce-scatter", "f32", OWN * SIZE),
        ("reduce-scatter", "f32", OWN * 2 * SIZE),
    ]
