"""Test that every box of a view equals NumPy's, and that views read no more than it."""

import numpy as np
import pytest

from moejax.interop import views
from moejax.interop.folder import TensorFolder
from tests.support.tensor_folders import BF16, SINGLE, write_arrays

E, D, F = 5, 12, 8


@pytest.fixture
def folder(tmp_path):
    """An open folder with the tensors of a few experts, separate and fused."""
    rng = np.random.default_rng(0)
    arrays = {f"up.{e}": rng.standard_normal((F, D)).astype(BF16) for e in range(E)}
    arrays |= {f"down.{e}": rng.standard_normal((D, F)).astype("f") for e in range(E)}
    arrays["fused"] = rng.standard_normal((E, D, 2 * F)).astype("f")
    arrays["bias"] = rng.standard_normal((1, E)).astype("f")
    write_arrays(tmp_path / SINGLE, arrays)
    opened = TensorFolder(tmp_path)
    return opened


def read_stack(folder, name: str) -> np.ndarray:
    """Return the tensors of all experts."""
    return np.stack([folder.view(f"{name}.{e}").read() for e in range(E)])


def stack(folder, name: str) -> views.View:
    """Return the view of the tensors of all experts."""
    return views.stacked([folder.view(f"{name}.{e}") for e in range(E)])


def heads(num_heads: int, width: int) -> np.ndarray:
    """Return the rows of interleaved heads in half-split order."""
    one = np.r_[0:width:2, 1:width:2]
    return (np.arange(num_heads)[:, None] * width + one).reshape(-1)


CASES = {
    "tensor": (lambda f: f.view("fused"), lambda f: f.view("fused").read()),
    "stacked": (lambda f: stack(f, "up"), lambda f: read_stack(f, "up")),
    "transposed": (
        lambda f: views.transposed(stack(f, "up"), (0, 2, 1)),
        lambda f: read_stack(f, "up").transpose(0, 2, 1),
    ),
    "stacked twice": (
        lambda f: views.transposed(
            views.stacked([stack(f, "down"), stack(f, "down")]), (1, 3, 0, 2)
        ),
        lambda f: np.stack([read_stack(f, "down")] * 2).transpose(1, 3, 0, 2),
    ),
    "joined": (
        lambda f: views.joined(
            [f.view("down.0"), f.view("down.3")], 1, [range(F), range(F, 2 * F)]
        ),
        lambda f: np.concatenate([f.view("down.0").read(), f.view("down.3").read()], 1),
    ),
    "joined in turns": (
        lambda f: views.joined(
            [f.view(f"up.{e}") for e in range(E)],
            0,
            [range(e, E * F, E) for e in range(E)],
        ),
        lambda f: read_stack(f, "up").swapaxes(0, 1).reshape(E * F, D),
    ),
    "first half": (
        lambda f: views.taken(f.view("fused"), 2, range(F)),
        lambda f: f.view("fused").read()[..., :F],
    ),
    "even columns": (
        lambda f: views.taken(f.view("fused"), 2, range(0, 2 * F, 2)),
        lambda f: f.view("fused").read()[..., ::2],
    ),
    "rows of heads": (
        lambda f: views.taken(f.view("down.0"), 0, heads(2, 6)),
        lambda f: f.view("down.0").read()[heads(2, 6)],
    ),
    "far columns": (
        lambda f: views.taken(f.view("fused"), 2, np.array([15, 0])),
        lambda f: f.view("fused").read()[..., [15, 0]],
    ),
    "item": (
        lambda f: views.item(f.view("fused"), 1, 3),
        lambda f: f.view("fused").read()[:, 3],
    ),
    "a dim of 1 dropped": (
        lambda f: views.item(f.view("bias"), 0, 0),
        lambda f: f.view("bias").read()[0],
    ),
    "taken through a transposition": (
        lambda f: views.taken(
            views.transposed(f.view("fused"), (2, 0, 1)), 0, range(1, 2 * F, 2)
        ),
        lambda f: f.view("fused").read()[..., 1::2].transpose(2, 0, 1),
    ),
    "taken in two dims": (
        lambda f: views.taken(
            views.taken(f.view("fused"), 1, range(0, D, 2)), 2, range(F)
        ),
        lambda f: f.view("fused").read()[:, ::2, :F],
    ),
    "cast": (
        lambda f: views.cast(f.view("up.0"), np.dtype(np.float32)),
        lambda f: f.view("up.0").read().astype(np.float32),
    ),
    "held": (
        lambda f: views.transposed(views.held(f.view("fused").read()), (2, 1, 0)),
        lambda f: f.view("fused").read().transpose(2, 1, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_box_is_numpys(case, folder):
    make, want = CASES[case][0](folder), CASES[case][1](folder)
    assert make.shape == want.shape
    assert make.dtype == want.dtype
    rng = np.random.default_rng(1)
    indices = [
        tuple(slice(*np.sort(rng.integers(0, size + 1, 2))) for size in want.shape)
        for _ in range(30)
    ]
    for index in [(), *indices]:
        part = want[index]
        got = make.read(index)
        assert got.tobytes() == np.ascontiguousarray(part).tobytes()
        cast = make.read(index, np.float32)
        assert cast.dtype == np.float32
        assert np.array_equal(cast, part.astype(np.float32))


@pytest.mark.parametrize("case", [case for case in CASES if case != "held"])
def test_a_box_reads_its_share(case, folder):
    """One index of the first dim reads its share of the bytes that the whole reads;
    rows of heads also read what lies between them."""
    view = CASES[case][0](folder)
    before = folder.bytes_read
    view.read()
    whole = folder.bytes_read - before
    view.read((slice(0, 1),))
    part = folder.bytes_read - before - whole
    assert part * view.shape[0] == whole > 0 or case == "far columns"


def test_different_tensors_are_not_put_together(folder):
    down, fused = map(folder.view, ("down.0", "fused"))
    message = r"must be equal, so they belong to different models"
    for together in (views.stacked, lambda x: views.joined(x, 0, [range(D)] * 2)):
        with pytest.raises(
            ValueError, match=rf"'fused' has shape \[5, 12, 16\].*{message}"
        ):
            together([down, fused])


def test_views_of_several_dtypes_are_widened(folder):
    down = folder.view("down.0")
    narrow = views.held(np.full(down.shape, 1.5, BF16))
    half = views.held(np.full(down.shape, 2.5, np.float16))
    for first, second in ((down, narrow), (narrow, down), (narrow, half)):
        both = views.stacked([first, second])
        assert both.dtype == np.float32
        for ours, theirs in zip(both.read(), (first.read(), second.read())):
            assert np.array_equal(ours, theirs.astype(np.float32))
    assert views.stacked([narrow, narrow]).dtype == BF16


@pytest.mark.parametrize("dtypes", [("f", "f"), (BF16, BF16), (BF16, "f"), ("f", BF16)])
def test_assign_is_a_copy_with_a_cast(dtypes):
    source, target = map(np.dtype, dtypes)
    x = np.random.default_rng(0).standard_normal((2, 300, 70)).astype(source)
    for dims in ((0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)):
        values = x.transpose(dims)
        for out in (np.zeros(values.shape, target),
                    np.zeros(values.shape[::-1], target).T):  # fmt: skip
            views.assign(out, values)
            assert np.array_equal(out, values.astype(target))
    views.assign(np.zeros(()), np.ones(()))
