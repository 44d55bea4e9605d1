"""Schedule and domain where they are 'auto', against the same run with values named."""

import dataclasses
import itertools
import random

from moejax.config import Balance, Config, Data, Dispatch, Model, Moe, Train
from moejax.plan.layout import Topology
from moejax.plan.parallel import candidate_domains
from moejax.plan.schedule_rules import SCHEDULES
from tests.support.resolved import make_run

MESHES = [
    (2, 1, 2, 2), (1, 2, 2, 2), (1, 1, 4, 2), (1, 1, 2, 4), (2, 1, 4, 1), (1, 2, 1, 4),
]  # fmt: skip
CHOICES = {
    "expert_shards": [None, None, 1, 2, 4],
    "exchange": ["exact", "exact", "capacity"],
    "transport": ["padded", "padded", "ragged", "hierarchical"],
    "group": ["expert", "data_expert", "dc_expert"],
    "split": [None, None, "local_first", "water_filling", "dynamic"],
    "store": [None, None, "owned", "transient", "sharded"],
    "buffer_factor": [1.5, 1.5, 0.3],
}


def random_run(seed: int) -> dict:
    """Return the parts of a random configuration of eight devices, whose schedule and
    domain are 'auto'."""
    rng = random.Random(seed)
    return {
        "mesh": Topology(*rng.choice(MESHES)),
        "model": Model(num_layers=1, d_model=16),
        "moe": Moe(
            num_experts=rng.choice([8, 16, 12]),
            d_expert=rng.choice([16, 32, 24]),
            halves=rng.random() < 0.2,
        ),
        "dispatch": Dispatch(
            schedule="auto",
            domain="auto",
            **{name: rng.choice(values) for name, values in CHOICES.items()},
        ),
        "data": Data(seq_len=rng.choice([4, 6, 7])),
        "train": Train(batch_size=8, loss_chunk=8),
        "balance": Balance(policy=rng.choice(["home", "home", "flexmoe", "micromoe"])),
    }


def layout_or_refusal(parts: dict, **named):
    """Return the layout of the run with these fields of Dispatch, or the line by which
    it is refused."""
    try:
        dispatch = dataclasses.replace(parts["dispatch"], **named)
        return make_run(Config(**parts | {"dispatch": dispatch})).layout
    except ValueError as refusal:
        return str(refusal)


def test_auto_takes_what_would_run_and_refuses_what_no_value_can_run():
    num_runs = 0
    for seed in range(100):
        parts = random_run(seed)
        chosen = layout_or_refusal(parts)
        mesh, shards = parts["mesh"], parts["dispatch"].expert_shards
        schedules = SCHEDULES if max(mesh.tensor, shards or 1) > 1 else ["auto"]
        named = {
            (schedule, domain): layout_or_refusal(
                parts, schedule=schedule, domain=domain
            )
            for schedule, domain in itertools.product(
                schedules, candidate_domains((mesh.dc, mesh.expert))
            )
        }
        if isinstance(chosen, str):
            assert "\n" not in chosen
            assert all(isinstance(answer, str) for answer in named.values()), seed
            continue
        num_runs += 1
        schedule = chosen.tensor.schedule if chosen.tensor else "auto"
        shared = chosen.domain.shared if chosen.domain else (1, 1)
        shared = shared if len(shared) == 2 else (1, *shared)
        assert named[schedule, shared] == chosen, seed
    assert num_runs >= 20


def test_where_no_schedule_can_run_the_line_has_the_rule_of_each():
    """A rule that has nothing to do with the schedule stands alone."""
    parts = random_run(0) | {
        "mesh": Topology(expert=4, tensor=2),
        "moe": Moe(num_experts=8, d_expert=16),
        "dispatch": Dispatch(transport="ragged"),
        "data": Data(seq_len=7),
        "train": Train(batch_size=4, loss_chunk=8),
        "balance": Balance(policy="flexmoe"),
    }
    line = layout_or_refusal(parts)
    for words in (
        "Dispatch.schedule='auto' has no value that can run: ",
        "'s1h': Dispatch.schedule='s1h' splits the 7 tokens",
        "'s2': transport='ragged' works with schedule=",
        "'local': Balance.policy='flexmoe' plans for owners",
    ):
        assert words in line
    parts |= {"dispatch": Dispatch(exchange="capacity"), "data": Data(seq_len=8)}
    assert layout_or_refusal(parts).startswith("Dispatch.exchange='capacity' drops")
