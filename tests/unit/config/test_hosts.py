"""--nnodes and its company: what it means, and what cannot be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.config.resolve import resolve
from octavo.config.types import DeviceInfo, EngineConfig, NodesConfig
from octavo.errors import ConfigError
from octavo.frontend.launch import node_token

CPU = DeviceInfo("cpu", "test cpu", 16 << 30, 8 << 30, 2)
GPUS = DeviceInfo("cuda", "test gpu", 140 << 30, 140 << 30, 16, (9, 0), count=2)
LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 4096, "dtype": "bfloat16"}


def make(device: DeviceInfo = CPU, *, share_gpus: bool = False, **settings: Any) -> EngineConfig:
    more: dict[str, Any] = {"node_token": "secret", "share_gpus": share_gpus}
    return resolve(EngineArgs(**settings), path="/m", name="m", hf_config=LLAMA, eos_token_ids=(), device=device, **more)


def test_ranks_are_dealt_out_in_order() -> None:
    parallel = make(GPUS, tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=2, node_rank=1, master_addr="10.0.0.1").parallel
    assert parallel.nodes == NodesConfig(2, 1, "10.0.0.1", 29501, 300.0, "secret")
    assert "secret" not in repr(parallel)
    assert parallel.per_node == 2
    assert [parallel.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]  # the ranks of a stage, which are neighbours, are on one host
    assert make(tensor_parallel_size=2).parallel.nodes.count == 1


@pytest.mark.parametrize(
    ("device", "settings", "words"),
    [
        (CPU, {"nnodes": 0}, "--nnodes must be at least 1"),
        (CPU, {"nnodes": 2}, r"--nnodes 2: the 1 ranks \(--tensor-parallel-size x --pipeline-parallel-size\) cannot be dealt out evenly"),
        (CPU, {"nnodes": 2, "tensor_parallel_size": 3}, "the 3 ranks"),
        (CPU, {"node_rank": 1}, "--node-rank 1: there is one host"),
        (CPU, {"nnodes": 2, "node_rank": 2, "tensor_parallel_size": 2}, "--node-rank 2: with --nnodes 2 it goes from 0 to 1"),
        (CPU, {"nnodes": 2, "master_port": 70000, "tensor_parallel_size": 2}, "--master-port must be from 1 to 65535"),
        (CPU, {"nnodes": 2, "master_addr": "", "tensor_parallel_size": 2}, "--master-addr is empty"),
        (CPU, {"nnodes": 2, "node_timeout": 0, "tensor_parallel_size": 2}, "--node-timeout must be greater than 0"),
        (CPU, {"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "--nnodes: replicas .* share a host"),
        (CPU, {"nnodes": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, "--nnodes: Ray places the ranks by itself"),
        (
            CPU,
            {"tensor_parallel_size": 2, "data_parallel_size": 2, "distributed_executor_backend": "ray"},
            "replicas whose ranks Ray places",
        ),
        (GPUS, {"nnodes": 2, "tensor_parallel_size": 8}, "--tensor-parallel-size 8: needs 4 GPUs on each of 2 hosts, and this one has 2"),
        (GPUS, {"tensor_parallel_size": 4}, "--tensor-parallel-size 4: needs 4 GPUs, and there are 2"),
    ],
)
def test_what_cannot_be(device: DeviceInfo, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(device, **settings)


def test_experts_are_dealt_out_to_the_ranks_of_a_layer_only() -> None:
    said = "--enable-expert-parallel has no effect without --tensor-parallel-size"
    assert any(w.startswith(said) for w in make(pipeline_parallel_size=2, enable_expert_parallel=True).warnings)
    assert not any(w.startswith(said) for w in make(tensor_parallel_size=2, enable_expert_parallel=True).warnings)


def test_ranks_share_gpus_where_that_is_allowed_and_there_are_too_few() -> None:
    config = make(GPUS, share_gpus=True, tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    assert (config.parallel.shared_gpus, config.cache.memory_utilization) == (2, 0.9 / 4)
    assert "OCTAVO_SHARE_GPUS: 8 ranks share 2 GPUs: right, and slow. For tests of several ranks." in config.warnings
    enough = make(GPUS, share_gpus=True, tensor_parallel_size=2)
    assert (enough.parallel.shared_gpus, enough.cache.memory_utilization) == (0, 0.9)
    assert not any("OCTAVO_SHARE_GPUS" in warning for warning in enough.warnings)
    with pytest.raises(ConfigError, match="needs 4 GPUs on each of 2 hosts"):
        make(GPUS, share_gpus=True, nnodes=2, tensor_parallel_size=8)
    assert make(share_gpus=True, tensor_parallel_size=2).parallel.shared_gpus == 0  # a CPU is shared anyway


def test_ray_may_have_more_gpus_than_this_host() -> None:
    parallel = make(GPUS, tensor_parallel_size=4, distributed_executor_backend="ray", node_timeout=7).parallel
    assert (parallel.executor, parallel.nodes.timeout) == ("ray", 7)
    assert make(tensor_parallel_size=1, distributed_executor_backend="ray").parallel.executor == "mp"  # one rank: nothing to place


def test_the_secret_comes_from_a_file_or_the_environment(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_NODE_TOKEN", "from outside\n")
    file = tmp_path / "token"
    file.write_text("from a file\n")
    args = EngineArgs()
    assert node_token(args) == "from outside"
    assert node_token(dataclasses.replace(args, node_token_file=str(file))) == "from a file"
    file.write_text("\n")
    with pytest.raises(ConfigError, match="it is empty"):
        node_token(dataclasses.replace(args, node_token_file=str(file)))
    monkeypatch.delenv("OCTAVO_NODE_TOKEN")
    assert node_token(args) == ""
