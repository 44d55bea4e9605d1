"""Test every rule of the configuration with one wrong value, and the message for it."""

import json

import pytest

from moejax.config import (
    Attention,
    Balance,
    Checkpoint,
    Config,
    Data,
    Dispatch,
    Mla,
    Model,
    Moe,
    Optimizer,
    Recorded,
    Rope,
    Router,
    Train,
)
from moejax.config.checks import MAX_WIDTH
from moejax.plan.layout import Topology
from train.config.names import PARTS, config_from_record

MINIMA = {
    0: """Optimizer.learning_rate Optimizer.warmup_steps Optimizer.final_lr_ratio
        Optimizer.weight_decay Optimizer.clip_norm Data.seed
        Train.check_replicas_every_steps Processes.watchdog_sec Checkpoint.keep_best
        Model.first_k_dense Attention.temperature_scale Rope.mscale Rope.mscale_all_dim
        Moe.num_shared_experts Router.jitter Router.balance_loss
        Router.sequence_balance_loss Router.z_loss Router.bias_rate
        Router.mutual_information_loss Recorded.zipf Recorded.hot_share""",
    1: """Mesh.dc Mesh.data Mesh.expert Mesh.tensor Optimizer.max_skipped_in_a_row
        Train.num_steps Train.batch_size Train.accumulate_steps Train.loss_chunk
        Train.eval_every_steps Train.eval_batches Train.log_load_every_steps
        Train.num_simulated_devices Processes.init_sec Checkpoint.every_steps
        Checkpoint.keep_last Model.vocab_size Model.d_model Model.num_layers
        Model.num_heads Model.num_kv_heads Model.head_dim Model.d_ff Model.moe_every
        Attention.sliding_window Attention.chunk_size Attention.temperature_floor
        Mla.kv_lora_rank Mla.q_lora_rank Mla.qk_nope_head_dim Mla.qk_rope_head_dim
        Mla.v_head_dim Rope.factor Rope.original_max_position_embeddings
        Moe.num_experts Moe.top_k Moe.d_expert
        Dispatch.slots_per_device Dispatch.expert_shards Router.num_groups
        Router.top_groups Balance.num_nodes Recorded.period_steps
        Recorded.steps_per_sample""",
    2: "Data.seq_len Data.held_out_every",
}
"""Fields by their smallest values."""


@pytest.mark.parametrize("minimum", MINIMA)
def test_minimum_values(minimum):
    for name in MINIMA[minimum].split():
        part, field = name.split(".")
        with pytest.raises(ValueError) as error:
            PARTS[part.lower()](**{field: minimum - 1})
        assert str(error.value) == f"{name}={minimum - 1} must be at least {minimum}"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Data(corpus=()), ["Data.corpus=() names no data"]),
        (lambda: Data(weights=(1.0, 2.0)), ["one weight for each of 1 corpora"]),
        (lambda: Data(weights=(0.0,)), ["must all be above 0", "leave a corpus out"]),
        (lambda: Model(num_heads=6, num_kv_heads=4),
         ["Model.num_heads=6", "a multiple of num_kv_heads=4"]),
        (lambda: Model(head_dim=7), ["Model.head_dim=7", "must be even"]),
        (lambda: Model(logits_scaling=0.0),
         ["Model.logits_scaling=0.0 must be above 0"]),
        (lambda: Model(layers=("dense",)),
         ["Model.layers=('dense',)", "a layer 'moe'", "moe_every=1"]),
        (lambda: Model(layers=("dense", "moe"), moe_every=2),
         ["Model.layers=('dense', 'moe')", "moe_every=2: leave that at 1"]),
        (lambda: Model(layers=("dense", "moe"), num_layers=3),
         ["Model.num_layers=3", "first_k_dense=0", "a multiple of the 2 layers"]),
        (lambda: Mla(kv_lora_rank=8, qk_rope_head_dim=5),
         ["Mla.qk_rope_head_dim=5 must be even"]),
        (lambda: Mla(q_lora_rank=8),
         ["Mla.q_lora_rank=8", "off: set Mla.kv_lora_rank"]),
        (lambda: Config(model=Model(num_kv_heads=2), mla=Mla(kv_lora_rank=8)),
         ["Mla.kv_lora_rank=8", "set Model.num_kv_heads=2 to num_heads=4"]),
        (lambda: Config(model=Model(qk_norm="head"), mla=Mla(kv_lora_rank=8)),
         ["Model.qk_norm='head' is not for latent attention", "to 'none'"]),
        (lambda: Attention(layers=()), ["Attention.layers=()", "use 'full'"]),
        (lambda: Attention(layers=("sliding", "full")),
         ["Attention.layers=('sliding', 'full')", "set Attention.sliding_window"]),
        (lambda: Attention(chunk_size=8),
         ["Attention.chunk_size=8 is for layers of kind 'chunked'", "to None"]),
        (lambda: Config(attention=Attention(layers=("full", "full", "nope"))),
         ["Model.num_layers=4", "a multiple of 3", "Attention.layers="]),
        (lambda: Config(model=Model(first_k_dense=2),
             attention=Attention(layers=("full", "nope"))),
         ["Model.first_k_dense=2", "several kinds", "in Model.layers"]),
        (lambda: Attention(clip_qkv=-1.0), ["Attention.clip_qkv=-1.0 must be above 0"]),
        (lambda: Rope(scaling="yarn", beta_fast=0.5),
         ["Rope.beta_slow=1.0", "at most beta_fast=0.5"]),
        (lambda: Rope(scaling="llama3", low_freq_factor=5.0),
         ["Rope.low_freq_factor=5.0", "at most high_freq_factor=4.0"]),
        (lambda: Rope(factor=4.0), ["Rope.factor=4.0", "Rope.scaling", "'none'"]),
        (lambda: Rope(partial_rotary_factor=1.5),
         ["Rope.partial_rotary_factor=1.5", "at most 1: it is a share"]),
        (lambda: Config(model=Model(head_dim=10),
             rope=Rope(partial_rotary_factor=0.5)),
         ["Rope.partial_rotary_factor=0.5", "Model.head_dim=10 is 5", "even"]),
        (lambda: Model(num_layers=6, first_k_dense=1, moe_every=2),
         ["Model.num_layers=6", "first_k_dense=1", "a multiple of moe_every=2"]),
        (lambda: Model(num_layers=2, first_k_dense=3),
         ["Model.num_layers=2", "first_k_dense=3", "at least one"]),
        (lambda: Model(num_layers=2, first_k_dense=2),
         ["Model.num_layers=2", "first_k_dense=2", "at least one"]),
        (lambda: Moe(num_experts=4, top_k=5),
         ["Moe.top_k=5", "more than num_experts=4"]),
        (lambda: Dispatch(buffer_factor=0.0),
         ["Dispatch.buffer_factor=0.0", "must be > 0"]),
        (lambda: Router(num_groups=2, top_groups=3),
         ["Router.top_groups=3", "exceeds num_groups=2"]),
        (lambda: Router(kind="recorded", bias_rate=0.001),
         ["Router.bias_rate=0.001", "choose by scores", "'recorded'", "to 0"]),
        (lambda: Router(kind="recorded", gate_input=True),
         ["Router.gate_input=True", "'recorded'", "to False"]),
        (lambda: Moe(shared_gate=True),
         ["Moe.shared_gate=True", "Moe.num_shared_experts=0", "to False"]),
        (lambda: Config(model=Model(block="shortcut")),
         ["Model.block='shortcut'", "Moe.num_shared_experts=0: use 1 or more"]),
        (lambda: Config(mesh=Topology(tensor=4), model=Model(num_kv_heads=2)),
         ["Model.num_kv_heads=2", "use 4, or Mesh.tensor = 2"]),
        (lambda: Config(mesh=Topology(tensor=4), model=Model(d_ff=30, moe_every=2)),
         ["Model.d_ff=30", "use 32, or Mesh.tensor = 2"]),
        (lambda: Config(mesh=Topology(tensor=4), model=Model(d_ff=30),
             moe=Moe(num_shared_experts=1, d_shared=9)),
         ["Moe.num_shared_experts * d_shared=9", "use 12, or Mesh.tensor = 1"]),
        (lambda: Dispatch(exchange="capacity", overflow="redo"),
         ["Dispatch.overflow='redo'", "leave Dispatch.overflow out"]),
        (lambda: Moe(d_shared=MAX_WIDTH, num_shared_experts=2**12),
         ["Moe.num_shared_experts=4096 times d_shared=1048576", "use fewer"]),
        (lambda: Config(moe=Moe(activation="clamped_swiglu"),
             router=Router(training="dense")),
         ["Moe.activation='clamped_swiglu'", "Router.training='dense'", "'sparse'"]),
        (lambda: Config(mesh=Topology(dc=2), moe=Moe(expert_bias=True),
             dispatch=Dispatch(domain=(2, 1), group="dc_expert", compression=8.0)),
         ["Moe.expert_bias=True", "Dispatch.compression=None, not 8.0"]),
        (lambda: Config(mesh=Topology(data=4), model=Model(d_model=126),
             moe=Moe(expert_bias=True)),
         ["Moe.expert_bias=True rests in 4 parts", "Model.d_model", "not 126"]),
        (lambda: Config(moe=Moe(num_experts=10), mesh=Topology(expert=4)),
         ["Moe.num_experts=10", "expert axis (4)", "use 8 or 12", "Mesh.expert"]),
        (lambda: Config(moe=Moe(num_experts=2), mesh=Topology(expert=4)),
         ["Moe.num_experts=2", "use 4 or 8"]),
        (lambda: Config(mesh=Topology(dc=2, data=2, expert=2),
             train=Train(batch_size=40, accumulate_steps=2)),
         ["Train.batch_size=40", "a multiple of 16", "accumulate_steps=2"]),
        (lambda: Config(mesh=Topology(data=4), train=Train(num_simulated_devices=8)),
         ["data=4", "has 4 devices", "Train.num_simulated_devices=8", "equal"]),
        (lambda: Config(moe=Moe(num_experts=8), router=Router(num_groups=3)),
         ["Router.num_groups=3", "must divide num_experts=8"]),
        (lambda: Config(moe=Moe(num_experts=8, top_k=3),
             router=Router(num_groups=4, top_groups=1)),
         ["Router.num_groups=4", "top_groups=1", "hold top_k=3 experts"]),
        (lambda: Config(mesh=Topology(expert=4), balance=Balance(num_nodes=3)),
         ["Balance.num_nodes=3 must divide the 4 devices", "use a divisor"]),
        (lambda: Config(mesh=Topology(expert=4),
             moe=Moe(num_experts=12), router=Router(num_groups=3, top_groups=3),
             balance=Balance(policy="eplb", num_nodes=2)),
         ["Balance.num_nodes=2 must divide Router.num_groups=3", "on one node"]),
        (lambda: Config(data=Data(seq_len=100), train=Train(loss_chunk=64)),
         ["Data.seq_len=100", "a multiple of Train.loss_chunk=64"]),
    ],
)  # fmt: skip
def test_error_names_the_field_the_value_and_what_to_do(make, words):
    with pytest.raises(ValueError) as error:
        make()
    for word in words:
        assert word in str(error.value)


def test_values_at_the_edge_of_each_rule_are_accepted():
    Config(
        mesh=Topology(dc=2, data=2, expert=4),
        model=Model(num_layers=5, first_k_dense=1, moe_every=2, num_kv_heads=1),
        moe=Moe(num_experts=4, top_k=4),
        router=Router(kind="sigmoid", bias_rate=0.1, num_groups=4, top_groups=4),
        data=Data(seq_len=100),
        train=Train(batch_size=32, accumulate_steps=2, num_simulated_devices=16),
    )


def test_dict_round_trip():
    """A configuration survives to_dict and config_from_record, also through JSON as in
    a checkpoint."""
    cfg = Config(
        mesh=Topology(data=2, expert=4),
        model=Model(qk_norm="full", tie_embeddings=False, rope_theta=5e5),
        moe=Moe(num_experts=16, top_k=3),
        dispatch=Dispatch(buffer_factor=4.0),
        router=Router(kind="sigmoid", bias_rate=0.001, gate_scale=2.5),
        recorded=Recorded(source="burst", hot_share=0.25),
        optimizer=Optimizer(decay="linear"),
        data=Data(seq_len=64, corpus=("a", "b c"), weights=(1.0, 2.5)),
        train=Train(run_dir="runs/a", loss_chunk=32),
        checkpoint=Checkpoint(keep_best=0),
    )
    record = cfg.to_dict()
    assert config_from_record(record) == cfg
    assert config_from_record(json.loads(json.dumps(record))) == cfg


def test_config_from_record_fills_defaults_and_checks_rules():
    partial = config_from_record({"moe": {"num_experts": 16}, "train": {}})
    assert partial == Config(moe=Moe(num_experts=16))
    with pytest.raises(ValueError, match=r"Moe\.top_k=9 is more than"):
        config_from_record({"moe": {"top_k": 9}})
    with pytest.raises(ValueError, match=r"has Model\.attention = 'xla', .* wrote it"):
        config_from_record({"model": {"attention": "xla"}})
