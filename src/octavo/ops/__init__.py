"""The hardware seam: typed operation signatures, a torch reference of each, and faster implementations by device."""
