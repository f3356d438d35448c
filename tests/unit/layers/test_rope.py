"""Frequencies of every kind of scaling against transformers, and the table made from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.errors import ConfigError
from octavo.layers import rope
from octavo.layers.rope import FrequencyDivisors, LinearScaling, RopeSpec, cos_sin_table, inverse_frequencies
from octavo.models.hf_config import HfConfig, rope_spec

factors = st.floats(1.5, 32.0)


def scalings() -> st.SearchStrategy[dict[str, Any]]:
    original = st.sampled_from([64, 512, 4096])
    return st.one_of(
        st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": factors}),
        st.fixed_dictionaries({"rope_type": st.just("dynamic"), "factor": factors}),
        st.fixed_dictionaries(
            {
                "rope_type": st.just("llama3"),
                "factor": factors,
                "low_freq_factor": st.floats(0.5, 2.0),
                "high_freq_factor": st.floats(2.5, 8.0),
                "original_max_position_embeddings": original,
            }
        ),
        st.fixed_dictionaries(
            {"rope_type": st.just("yarn"), "factor": factors, "original_max_position_embeddings": original},
            optional={"beta_fast": st.integers(8, 64), "beta_slow": st.integers(1, 4), "truncate": st.booleans()},
        ),
        st.fixed_dictionaries(
            {
                "rope_type": st.just("longrope"),
                "factor": factors,
                "short_factor": st.lists(st.floats(1.0, 4.0), min_size=32, max_size=32),
                "long_factor": st.lists(st.floats(1.0, 64.0), min_size=32, max_size=32),
                "original_max_position_embeddings": original,
            }
        ),
    )


@settings(max_examples=150, deadline=None)
@given(scaling=scalings(), theta=st.sampled_from([1e4, 5e5, 1e6]), length=st.sampled_from([32, 4096, 20000]))
def test_frequencies_equal_transformers(scaling: dict[str, Any], theta: float, length: int) -> None:
    parameters = {"rope_theta": theta, **scaling}
    hf = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=8192, rope_parameters=dict(parameters)
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](hf, torch.device("cpu"), seq_len=length)
    spec = rope_spec(HfConfig({"max_position_embeddings": 8192, "rope_parameters": parameters}), 64)
    frequencies, factor = inverse_frequencies(spec, length)
    torch.testing.assert_close(torch.from_numpy(frequencies), expected, rtol=1e-5, atol=0)
    assert factor == pytest.approx(expected_factor)


def test_older_and_newer_config_formats_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    newer = HfConfig({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    older = HfConfig({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}})
    oldest = HfConfig({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    assert rope_spec(newer, 64) == rope_spec(older, 64) == rope_spec(oldest, 64)
    plain = rope_spec(HfConfig({"rope_theta": 5e5, "rope_scaling": None}), 64)
    assert plain == rope_spec(HfConfig({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}), 64) == RopeSpec(5e5, 64)


def test_table_holds_cosines_then_sines_of_every_position() -> None:
    table = cos_sin_table(RopeSpec(100.0, 8), 8, 50, torch.device("cpu"))
    assert table.shape == (50, 8)
    assert table.dtype == torch.float32
    for position in (0, 1, 49):
        angles = [position * 100.0 ** (-2 * i / 8) for i in range(4)]
        assert table[position].tolist() == pytest.approx([*map(math.cos, angles), *map(math.sin, angles)], abs=1e-5)


def test_divisors_divide_each_frequency() -> None:
    plain, _ = inverse_frequencies(RopeSpec(100.0, 8), 10)
    divided, factor = inverse_frequencies(RopeSpec(100.0, 8, FrequencyDivisors((1.0, 2.0, 4.0, 8.0))), 10)
    assert (plain / divided).tolist() == pytest.approx([1.0, 2.0, 4.0, 8.0])
    assert factor == 1.0


def test_partial_rotation() -> None:
    assert rope_spec(HfConfig({"partial_rotary_factor": 0.5}), 64).rotary_dim == 32
    assert rope_spec(HfConfig({"rope_parameters": {"partial_rotary_factor": 0.25}}), 64).rotary_dim == 16


def test_scaling_given_beside_newer_parameters_wins() -> None:
    """An override in the older format must not be lost on a config in the newer one."""
    config = HfConfig({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert rope_spec(config, 64) == RopeSpec(5e5, 64, LinearScaling(2.0))


def test_a_table_that_does_not_fit_is_said_in_the_users_words() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=1152921504606846976.*--max-model-len"):
        cos_sin_table(RopeSpec(100.0, 64), 64, 2**60, torch.device("cpu"))


@pytest.mark.parametrize("spec", [RopeSpec(100.0, 64), None])
def test_a_table_is_not_begun_that_the_memory_does_not_hold(spec: RopeSpec | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would promise it, and end the process while it is filled."""
    monkeypatch.setattr(rope, "host_memory", lambda: (2**40, 2**29))
    monkeypatch.setattr(rope, "np", None)
    with pytest.raises(ConfigError, match=r"max_model_len=2097152: no memory for a table of so many positions"):
        cos_sin_table(spec, 64, 2**21, torch.device("cpu"))
