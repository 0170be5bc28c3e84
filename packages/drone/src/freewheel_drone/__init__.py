"""An environment of quadrotors over rough terrain, with thousands of them on one device."""
