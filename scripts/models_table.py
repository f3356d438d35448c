"""Writes the table of supported models in README.md from the registry: `python scripts/models_table.py`. A test keeps it up to date."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.models.encoder_families import ENCODERS
from octavo.models.registry import FAMILIES

README = Path(__file__).parents[1] / "README.md"
_BETWEEN = re.compile(r"(?<=<!-- models -->\n).*?(?=<!-- /models -->)", re.DOTALL)


def table() -> str:
    """The lines of the table."""
    rows = [(family.title, ", ".join(f"`{name}`" for name in family.architectures)) for family in FAMILIES]
    encoders = ", ".join(dict.fromkeys(re.sub("Model$|For.*", "", name) for name in ENCODERS))
    rows.append((f"Encoders, for pooling: {encoders}", "`...Model`, `...ForMaskedLM`, `...ForSequenceClassification`"))
    rows.append(("Decoders of the families above, for pooling", "`...Model`, `...ForSequenceClassification`, `...ForCausalLM`"))
    return "\n".join(["| models | architecture in config.json |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows), ""])


def updated(readme: str) -> str:
    """`readme` with the table in its place."""
    return _BETWEEN.sub(lambda _: table(), readme, count=1)


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
