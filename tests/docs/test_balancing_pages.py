"""Run the policy of docs/extend.md as it is written there, and check the table of
settings in docs/balance.md."""

import dataclasses
import re
import types
import typing

import numpy as np

from moejax.balance.candidates import ratio_by_layer
from moejax.balance.policies import POLICIES, Policy
from moejax.config import Balance
from moejax.perf.cost_model import NOTES
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Store

L, W, E = 2, 8, 16
ROWS = 4096
"""Number of rows that one source device has in a step."""


def test_the_policy_of_the_page_evens_a_zipf_load(repo):
    page = (repo / "docs" / "extend.md").read_text()
    file, entry = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    module = types.ModuleType("hottest")
    exec(compile(file, "extend.md", "exec"), module.__dict__)
    policy = eval(f"{{{entry}}}", {"Policy": Policy, "hottest": module})["hottest"]
    layout = Layout(E, W, 3, 64, "ragged", store="resident", offers_per_device=2,
                    copies_per_device=1)  # fmt: skip
    home = ExpertPlan.home_in(layout, L)
    load_e = 1 / np.arange(1, E + 1)
    load_lwe = np.tile(ROWS * load_e / load_e.sum(), (L, W, 1))
    plan = policy.plan(load_lwe, layout, NOTES, home).validate(layout)
    before, after = (ratio_by_layer(load_lwe, p, layout).max() for p in (home, plan))
    assert f"{before:.2f} at home and {after:.2f} with `hottest`" in page
    assert after < 0.5 * before


def test_the_page_of_settings_has_all_of_them_with_their_defaults(repo):
    page = (repo / "docs" / "balance.md").read_text()
    for field in dataclasses.fields(Balance):
        assert f"| `{field.name}` | `{field.default!r}` |" in page
    for name in (*POLICIES, *typing.get_args(Store)):
        assert f"\n| `{name}` | " in page
