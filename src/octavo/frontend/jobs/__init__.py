"""Work of requests that may have to be ended: it runs in processes of its own, a few at a time, fairly between clients.

`line` says who is next, `process` is one process as its owner sees it, `pool` gives jobs to processes, `worker` is what runs in them.
"""
