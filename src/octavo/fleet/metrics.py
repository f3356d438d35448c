"""The metrics of all replicas as one text: each sample gets a label that says whose it is."""

from __future__ import annotations

from collections.abc import Mapping


def merged(texts: Mapping[str, bytes]) -> bytes:
    """The Prometheus texts of replicas, family by family, with the replica's name as label `replica` on every sample."""
    heads: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in sorted(texts.items()):
        family = ""
        for line in text.decode("utf-8").splitlines():
            if line.startswith("# "):
                _, what, family, *_ = line.split(" ", 3)
                heads.setdefault(family, {}).setdefault(what, line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, f'replica="{replica}"'))
    lines = [line for family, head in heads.items() for line in (*head.values(), *samples.get(family, ()))]
    return ("\n".join(lines) + "\n").encode() if lines else b""


def _labelled(sample: str, label: str) -> str:
    brace, space = sample.find("{"), sample.find(" ")
    if brace != -1 and brace < space:
        inside = sample[brace + 1 :]
        return f"{sample[:brace]}{{{label}{'' if inside.startswith('}') else ','}{inside}"
    return f"{sample[:space]}{{{label}}}{sample[space:]}"
