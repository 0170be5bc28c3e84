"""Workers as Ray actors, on one machine or on the nodes of a cluster. Needs the extra `ray`."""
