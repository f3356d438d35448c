"""Several API servers over one engine (`--api-server-count`).

The main process (`hub.py`) holds the listening sockets, supervises the engine and starts the API servers (`process.py`), each an
HTTP application of its own with a client (`client.py`) whose engine is behind the main process.
"""
