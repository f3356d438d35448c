"""Every causal language model that the installed transformers has, served by Octavo: are its tokens those of `generate`?

    python benchmarks/model_coverage.py [Class ...] [--write]

For each class a tiny random model is made from a config, saved, and run through `LLM` with three prompts of unequal length, greedily and
past several blocks and the sliding window. It then either gives the tokens that `generate` gives, or refuses the model with a reason. All
else is a fault. `--write` puts the outcome into benchmarks/results/model_coverage.json and the table in docs/models.md; of named classes, in
place of what was known of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

PROMPTS = (3, 20, 41)
"""Tokens of each."""
NEW_TOKENS = 24
CLOSE = 1e-3
"""Two logits nearer than this may change places by rounding."""
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "model_coverage.json"
DOCS = ROOT / "docs" / "models.md"
_BETWEEN = re.compile(r"(?<=<!-- coverage -->\n).*?(?=<!-- /coverage -->)", re.DOTALL)

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "embed_dim": 32, "embedding_size": 32, "word_embed_proj_dim": 32, "lru_width": 32,
    "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "dff": 48, "ffn_hidden_size": 48, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24, "expert_ffn_hidden_size": 16,
    "shared_intermediate_size": 24, "shared_experts_intermediate_size": 16, "mlp_intermediate_size": 48, "intermediate_size_mlp": 48,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 2, "encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "head_dim": 8, "kv_channels": 8, "swa_head_dim": 8, "global_head_dim": 8, "v_head_dim": 8, "swa_v_head_dim": 8,
    "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_seq_len": 256, "max_sequence_length": 256, "seq_length": 256,
    "initializer_range": 0.2, "init_std": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "moe_top_k": 2,
    "n_shared_experts": 1, "moe_num_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "qk_head_dim": 12, "rotary_dim": 4,
    "sliding_window": 9, "attention_window_size": 9, "window_size": 9,
    "index_topk": 16, "index_head_dim": 8, "index_n_heads": 2,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "chunk_size": 8,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 2, "laurel_rank": 4, "altup_num_inputs": 2,
    "num_heads": 2, "is_decoder": True, "image_size": 28, "patch_size": 14, "depth": 1, "projection_dim": 32, "out_hidden_size": 32,
}  # fmt: skip
"""Made small wherever a config has them."""
_WINDOWS = ["sliding_attention", "full_attention"] * 2
_BY_KIND = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _WINDOWS}
MORE: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {"rope_parameters": _BY_KIND},
    "DbrxConfig": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32, "moe_top_k": 2},
    },
    "DoryConfig": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "Gemma3nTextConfig": {"layer_types": _WINDOWS, "activation_sparsity_pattern": [0.0] * 4},
    "Gemma4TextConfig": {"layer_types": _WINDOWS},
    "Gemma4UnifiedTextConfig": {"layer_types": _WINDOWS},
    "GraniteMoeHybridConfig": {"layer_types": ["attention"] * 4},
    "LongcatFlashConfig": {"head_dim": 4},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
}
"""What single configs need besides."""


def small_config(config_class: Any) -> Any:
    """A small config of its kind, and of the parts inside."""
    known = config_class().to_dict()
    names = set(known) | set(getattr(config_class, "attribute_map", {}))
    fields = {k: v for k, v in SIZES.items() if k in names}
    if "qk_rope_head_dim" in names:
        fields.pop("head_dim", None)
        fields |= {"num_key_value_heads": 4} if "num_key_value_heads" in names else {}
    fields |= MORE.get(config_class.__name__, {})
    for name, part in getattr(config_class, "sub_configs", {}).items():
        if name in names and name not in fields and part.__name__ != "AutoConfig":
            fields[name] = small_config(part)
    return config_class(**fields)


def small_model(name: str) -> Any:
    """A random model of a class, lively enough that a wrong weight shows."""
    import torch
    import transformers

    cls = getattr(transformers, name)
    config = small_config(cls.config_class)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        if sum(p.numel() for p in cls(config).parameters()) > 50_000_000:
            raise ValueError("a small config of it is not small")
    torch.manual_seed(0)
    model = cls(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                norm = "norm" in parameter_name or ".ln_" in parameter_name
                parameter.normal_(1.0 if norm and not parameter_name.endswith("bias") else 0.0, 0.2)
    return model


def expected_tokens(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What `generate` gives for each prompt alone."""
    import torch

    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            tokens = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        out.append(tokens[0, len(prompt) :].tolist())
    return out


def forward_tokens(model: Any, prompt: list[int]) -> list[int]:
    """What a pass over the whole gives, token by token. `generate` counts positions or drops keys otherwise in a few classes."""
    import torch

    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def near_tie(model: Any, ids: list[int], one: int, other: int) -> bool:
    """Whether the model itself can hardly tell which of two tokens comes next."""
    import torch

    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
    return bool((logits[one] - logits[other]).abs() < CLOSE)


def _reason(error: Exception, folder: str) -> str:
    """A message without what is the same in all of them."""
    return str(error).replace(folder, "FOLDER").partition(" Octavo's own:")[0]


def refused_at_once(name: str) -> str:
    """Why a class is refused before its weights are read, or nothing."""
    import transformers

    from octavo import LLM
    from octavo.errors import UnsupportedModel

    with tempfile.TemporaryDirectory() as folder:
        try:
            config = getattr(transformers, name).config_class()
            config.architectures = [name]
            config.save_pretrained(folder)
            LLM(folder, device="cpu", skip_tokenizer_init=True, load_format="dummy", max_model_len=128, num_gpu_blocks_override=64)
        except UnsupportedModel as e:
            return _reason(e, folder)
        except Exception:
            return ""
    return ""


def check(name: str) -> dict[str, str]:
    """The outcome of one class: how it runs (`way`), and what happened."""
    import torch

    from octavo import LLM, SamplingParams
    from octavo.errors import OctavoError
    from octavo.models.registry import supported_architectures

    torch.set_num_threads(1)
    way = "own" if name in supported_architectures() else "transformers"
    try:
        model = small_model(name)
        numbers = torch.Generator().manual_seed(1)
        prompts = [torch.randint(3, 127, (n,), generator=numbers).tolist() for n in PROMPTS]
        expected = expected_tokens(model, prompts)
    except Exception as e:
        reason = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}"
        return (
            {"way": way, "outcome": "refused", "reason": refusal}
            if (refusal := refused_at_once(name))
            else {"way": way, "outcome": "not built", "reason": reason}
        )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            with LLM(
                folder, device="cpu", threads=1, skip_tokenizer_init=True, dtype="float32", max_model_len=128, num_gpu_blocks_override=64,
                kv_cache_dtype="float32", max_num_batched_tokens=32, max_num_seqs=4, cpu_activations="float32",
            ) as llm:  # fmt: skip
                params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
                outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
                found = [list(o.outputs[0].token_ids) for o in outputs]
        except OctavoError as e:
            return {"way": way, "outcome": "refused", "reason": _reason(e, folder)}
        except Exception as e:
            return {"way": way, "outcome": "FAULT", "reason": f"{type(e).__name__}: {e}"}
    if found == [forward_tokens(model, prompt) for prompt in prompts] != expected:
        return {"way": way, "outcome": "equal", "reason": "to a pass over the whole, from which `generate` of transformers differs"}
    for prompt, theirs, ours in zip(prompts, expected, found, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b), None)
        if at is not None and not near_tie(model, prompt + theirs[:at], theirs[at], ours[at]):
            return {"way": way, "outcome": "WRONG", "reason": f"token {at} behind a prompt of {len(prompt)} differs"}
    return {"way": way, "outcome": "equal", "reason": ""}


def _quietly(name: str, out: Any) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    out.send(check(name))


def checked(name: str, seconds: float) -> dict[str, str]:
    """`check` in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_quietly, args=(name, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            return dict(receiver.recv())
        return {"way": "", "outcome": "FAULT", "reason": f"no answer within {seconds:.0f} s"}
    except EOFError:
        return {"way": "", "outcome": "FAULT", "reason": "its process ended"}
    finally:
        process.kill()
        process.join()


def causal_classes() -> list[str]:
    """Every class of transformers that it counts among causal language models, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = set()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        names |= {name} if isinstance(name, str) else set(name)
    return sorted(names)


REASONS = {
    "does not let its attention be swapped": "refused: the attention of transformers' implementation cannot be swapped",
    "keeps a state": "refused: layers that keep a state besides keys and values, or attend to images",
    "not all of its layers are attention layers": "refused: layers that keep a state besides keys and values, or attend to images",
    "a mask of the model's own": "refused: it computes with the attention mask (sparse attention by an indexer, mostly)",
}
"""Part of a message -> what to say of it in the table."""


def kind_of(outcome: dict[str, str]) -> str:
    """The row of the table that an outcome belongs to."""
    if outcome["outcome"] == "equal":
        return "equal, with code of our own" if outcome["way"] == "own" else "equal, through transformers"
    if outcome["outcome"] == "refused":
        return next((says for part, says in REASONS.items() if part in outcome["reason"]), "refused for another reason")
    return {"not built": "not tried: no small model of it could be made"}.get(outcome["outcome"], outcome["outcome"])


def table(outcomes: dict[str, dict[str, str]]) -> str:
    """The lines of the table in the documentation."""
    kinds: dict[str, list[str]] = {}
    for name, outcome in outcomes.items():
        kinds.setdefault(kind_of(outcome), []).append(re.sub("(ForCausalLM|(?<!With)LMHeadModel)$", "", name))
    rows = sorted(
        kinds.items(), key=lambda item: (*(not item[0].startswith(part) for part in ("equal, with", "equal", "refused")), -len(item[1]))
    )
    lines = (f"| {kind} | {len(names)} | {', '.join(names)} |" for kind, names in rows)
    return "\n".join(["| outcome | classes | which |", "|---|---|---|", *lines, ""])


def write(outcomes: dict[str, dict[str, str]]) -> None:
    """Into the results, and the documentation's table."""
    import transformers

    from octavo.cli.bench.results import write_json

    counts: dict[str, int] = {}
    for outcome in outcomes.values():
        counts[kind_of(outcome)] = counts.get(kind_of(outcome), 0) + 1
    write_json(RESULTS, {"transformers": transformers.__version__, "counts": counts, "classes": outcomes})
    DOCS.write_text(_BETWEEN.sub(lambda _: table(outcomes), DOCS.read_text(encoding="utf-8"), count=1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("classes", nargs="*")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each class")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    import torch
    import transformers

    torch.set_num_threads(1)  # a fork must not find threads
    outcomes: dict[str, dict[str, str]] = {}
    for name in args.classes or causal_classes():
        getattr(transformers, name)
        outcomes[name] = checked(name, args.seconds)
        print(f"{name:38} {outcomes[name]['way']:13} {outcomes[name]['outcome']:10} {outcomes[name]['reason'][:300]}", flush=True)
    if args.write:
        before = json.loads(RESULTS.read_text(encoding="utf-8"))["classes"] if args.classes else {}
        write(dict(sorted({**before, **outcomes}.items())))
    for outcome in sorted({o["outcome"] for o in outcomes.values()}):
        print(outcome, sum(o["outcome"] == outcome for o in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
