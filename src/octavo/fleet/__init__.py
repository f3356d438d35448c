"""A fleet: replicas of a server on the hosts of a Ray cluster, as many as there is work for, behind one address (Ray Serve)."""
