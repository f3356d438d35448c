"""Every operation in plain torch: short, right on any device and in any float dtype, and what all others are tested against."""

from __future__ import annotations

from octavo.ops.reference.activation import gated_mul
from octavo.ops.reference.experts import experts, pack_coded_experts, pack_experts
from octavo.ops.reference.linear import embedding, embedding_part, linear, pack_linear
from octavo.ops.reference.low_bit import pack_low_bit
from octavo.ops.reference.norm import add_rms_norm, rms_norm
from octavo.ops.reference.rope import rope
from octavo.ops.registry import Ops

OPS = Ops(
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope=rope,
    gated_mul=gated_mul,
    pack_linear=pack_linear,
    pack_coded=pack_low_bit,
    linear=linear,
    embedding=embedding,
    embedding_part=embedding_part,
    pack_experts=pack_experts,
    pack_coded_experts=pack_coded_experts,
    experts=experts,
)
