"""What rounded activations and a float16 cache cost on a fixed text with the bundled model: perplexity, and the divergence of the next token."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.attention.native_cpu import NativeCpuAttention
from octavo.checkpoint.local import open_gguf
from octavo.config.args import EngineArgs
from octavo.frontend.text.tokenizer import load_tokenizer
from octavo.ops.cpu import abi
from tests.models.contiguous import run
from tests.models.test_bundled import load_bundled
from tests.support.bundled import bundled_model_path
from tests.support.paged_batches import Pool, step_batch

pytestmark = [pytest.mark.model, pytest.mark.skipif(abi.library() is None, reason="the compiled kernels were not built")]

TEXT = """The river rises in the hills to the north of the town, where a spring feeds a shallow pool between old oak trees. In summer the
water is so low that children can walk across on the stones, and in the evening people come down from the houses to sit on the bank and
talk. The mill has stood there for more than two hundred years. Its wheel no longer turns, but the building was repaired by the village
after the great flood, and today it is a small museum. Visitors can see how grain was ground into flour, how the miller kept his books,
and what a loaf of bread cost in those days. On the upper floor there is a collection of maps. They show how the bed of the river moved
over time: at first it made a wide curve to the west, then, after the harbour was built, it was led through a straight canal. Engineers
of that time believed that faster water would carry the sand out to sea. They were right about the sand, but they had not thought of the
fields, which dried out within a few years. A long argument followed, and in the end a weir was built that is still in use."""


def perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    chosen = torch.log_softmax(logits[:-1].double(), -1).gather(1, torch.tensor(ids[1:])[:, None])
    return math.exp(-float(chosen.mean()))


def paged_logits(activations: str, ids: list[int]) -> torch.Tensor:
    """Through the compiled attention and its float16 cache, in two chunks."""
    model = load_bundled(ops="native", activations=activations)
    blocks = -(-len(ids) // 16) + 1
    attention = NativeCpuAttention(model.layer_specs, blocks, 16, torch.float16, torch.device("cpu"))
    tables, parts, start = Pool(blocks, 16, seed=1).tables([len(ids)]), [], 0
    for count in (100, len(ids) - 100):
        batch = step_batch([start], [count], tables, 16)
        batch.token_ids.copy_(torch.tensor(ids[start : start + count]))
        parts.append(model.logits(model.forward(batch.token_ids, batch.positions, attention.plan(batch))))
        start += count
    return torch.cat(parts)


def test_rounding_stays_near_float32() -> None:
    """8 bits without more of them for what is large came to a divergence of 3.4e-3, and answered README.md's first question wrongly."""
    ids = load_tokenizer(open_gguf(bundled_model_path(), "bundled", None), EngineArgs()).encode(TEXT)
    assert 200 < len(ids) < 400
    exact = run(load_bundled(ops="cpu"), ids)
    reference = perplexity(exact, ids)
    assert 5 < reference < 40, "the text is one that the model can read"
    target = torch.log_softmax(exact.double(), -1)
    for activations, limit, most in (("float32", 1e-4, 1e-5), ("int16", 1e-4, 1e-5), ("int8", 5e-3, 1.5e-3)):
        logits = paged_logits(activations, ids)
        ratio = perplexity(logits, ids) / reference
        divergence = float((target.exp() * (target - torch.log_softmax(logits.double(), -1))).sum(-1).mean())
        same = float((logits.argmax(-1) == exact.argmax(-1)).double().mean())
        print(f"{activations}: perplexity {reference:.3f} x {ratio:.5f}, mean divergence {divergence:.2e}, same likeliest token {same:.1%}")
        assert abs(ratio - 1) < limit, activations
        assert 0 <= divergence < most, activations
