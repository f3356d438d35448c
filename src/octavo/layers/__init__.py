"""What models are made of. A layer calls the operations it was handed and names no device and no kernel."""
