"""Acting: how one Env of B lanes is driven, and the RunnerFactory that travels to where it is driven."""
