"""`octavo bench`: measuring. One module a benchmark, and the workload and result code they share."""
