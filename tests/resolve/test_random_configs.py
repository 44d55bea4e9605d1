"""Random configurations of small models: each is refused in one line that names a
field, or its train step traces."""

import re

import pytest

from tests.support.random_configs import prepare, random_config, trace

SEEDS = range(120)
TRACED_EVERY = 4
"""Of the accepted configurations, the share of one in so many is traced."""
FIELD = re.compile(r"\b[A-Z][a-z]+\.[a-z_]+|\b[a-z_]+=")


@pytest.mark.slow
def test_is_refused_in_one_line_or_traces():
    refusals, accepted = [], []
    for seed in SEEDS:
        try:
            accepted.append((seed, prepare(random_config(seed))))
        except (ValueError, NotImplementedError) as error:
            refusals.append((seed, type(error), str(error)))
    for seed, kind, line in refusals:
        assert kind in (ValueError, NotImplementedError), seed  # no kind of theirs
        assert FIELD.search(line), (seed, line)
        assert "\n" not in line, (seed, line)
    assert len(accepted) > len(SEEDS) // 7
    for _seed, context in accepted[::TRACED_EVERY]:
        trace(context)
