"""Test the rounds in which states travel to new copies."""

import numpy as np
import pytest

from moejax.plan.owner_moves import state_rounds

W, E, SLOTS = 4, 12, 5


def random_slots(rng: np.random.Generator) -> np.ndarray:
    """Return the slots of one layer, [w, s]: the own experts and random copies."""
    row_ws = np.full((W, SLOTS), -1)
    row_ws[:, : E // W] = np.arange(E).reshape(W, -1)
    for device in range(W):
        others = np.setdiff1d(np.arange(E), row_ws[device])
        count = rng.integers(0, SLOTS - E // W + 1)
        row_ws[device, E // W : E // W + count] = rng.choice(others, count, False)
    return row_ws


@pytest.mark.parametrize("seed", range(5))
def test_every_new_copy_gets_its_state_once(seed):
    rng = np.random.default_rng(seed)
    old_ws, new_ws = random_slots(rng), random_slots(rng)
    rounds = state_rounds(old_ws.ravel(), new_ws.ravel(), np.arange(E), W)
    sent = [pair for pairs in rounds for pair in pairs]
    assert sorted(sent) == sorted(
        (int(expert), device)
        for device in range(W)
        for expert in np.setdiff1d(new_ws[device], old_ws[device])
        if expert >= 0
    )
    for pairs in rounds:
        devices = [device for _, device in pairs]
        assert len(set(devices)) == len(devices), "a device receives one state a round"
        owners = {position // (E // W): position for position, _ in pairs}
        assert all(owners[p // (E // W)] == p for p, _ in pairs), "and sends one"


def test_states_come_from_where_the_owner_is():
    owned_e = np.roll(np.arange(E), 3)
    row_ws = np.concatenate([owned_e.reshape(W, -1), np.full((W, 2), -1)], axis=1)
    new_ws = row_ws.copy()
    new_ws[0, 3] = 5
    (pairs,) = state_rounds(row_ws.ravel(), new_ws.ravel(), owned_e, W)
    assert pairs == [(8, 0)]
    assert owned_e[8] == 5
