"""From logits to tokens: stages that work on the device, by request slot, and cost nothing to requests that don't use them."""
