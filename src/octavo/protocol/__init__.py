"""Messages between the parts of the engine. No torch, no behaviour: data that can cross a process boundary."""
