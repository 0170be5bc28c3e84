"""A quadrotor over rough terrain, thousands at once on one device."""
