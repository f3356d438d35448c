"""vLLM's home of the beam search results."""

from octavo import BeamSearchOutput, BeamSearchSequence

__all__ = ["BeamSearchOutput", "BeamSearchSequence"]
