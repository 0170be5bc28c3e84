"""Ray (the extra `ray`): actors on one machine or on the nodes of a cluster, as one more wire."""
