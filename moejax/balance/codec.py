"""The balancer's values as JSON, from which they come back bit for bit: in checkpoints,
and on the way to other processes.

A dataclass is an object with its name and its fields, an array is its dtype, shape and
little-endian bytes, and sequences are tuples. Python writes the digits of a float that
give the same float back.
"""

import base64
import dataclasses
import json
from typing import Any

import numpy as np

from moejax.balance.adoptions import Adoptions
from moejax.balance.controller import State
from moejax.balance.decision import Decision
from moejax.balance.loads import LoadTracker
from moejax.balance.methods import Method
from moejax.balance.overflows import State as Overflows
from moejax.balance.planning import (
    Adopted,
    Compiled,
    Observed,
    Planner,
    Refused,
    Reply,
    Snapshot,
    Task,
)
from moejax.balance.settings import Settings
from moejax.balance.step_clock import StepClock
from moejax.perf.calibration import Calibration
from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.plan.parallel import Domain, Tensor

KINDS = {
    "Adopted": Adopted, "Adoptions": Adoptions, "Calibration": Calibration,
    "Compiled": Compiled, "CostModel": CostModel,
    "Decision": Decision, "Domain": Domain, "ExpertPlan": ExpertPlan, "Layout": Layout,
    "LoadTracker": LoadTracker, "Method": Method, "Observed": Observed,
    "Overflows": Overflows,
    "Planner": Planner, "Refused": Refused, "Reply": Reply, "Settings": Settings,
    "Snapshot": Snapshot, "State": State, "StepClock": StepClock, "Task": Task,
    "Tensor": Tensor,
}  # fmt: skip
"""Classes of the values, by the names in JSON."""
NAMES = {kind: name for name, kind in KINDS.items()}


def dumps(value: Any) -> str:
    """Return the JSON of a value of KINDS, from which `loads` restores it."""
    return json.dumps(_record(value))


def loads(text: str) -> Any:
    """Return the value that `dumps` wrote. Its arrays are read-only."""
    return _value(json.loads(text))


def _record(value: Any) -> Any:
    if type(value) in NAMES:
        fields = (field.name for field in dataclasses.fields(value))
        record = {name: _record(getattr(value, name)) for name in fields}
        return {"kind": NAMES[type(value)], "fields": record}
    if isinstance(value, np.ndarray):
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        return {
            "dtype": little.dtype.str,
            "shape": list(little.shape),
            "base64": base64.b64encode(little.tobytes()).decode(),
        }
    if isinstance(value, dict):
        return {"dict": {key: _record(each) for key, each in value.items()}}
    if isinstance(value, tuple):
        return [_record(each) for each in value]
    return value


def _value(record: Any) -> Any:
    if isinstance(record, list):
        return tuple(map(_value, record))
    if not isinstance(record, dict):
        return record
    if "dict" in record:
        return {key: _value(each) for key, each in record["dict"].items()}
    if "base64" in record:
        little = np.frombuffer(base64.b64decode(record["base64"]), record["dtype"])
        native = little.astype(little.dtype.newbyteorder("="), copy=False)
        return native.reshape(record["shape"])
    fields = {name: _value(each) for name, each in record["fields"].items()}
    return KINDS[record["kind"]](**fields)
