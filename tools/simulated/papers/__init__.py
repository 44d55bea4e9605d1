"""The papers' tables beside the price by which a run decides: one module a paper."""
