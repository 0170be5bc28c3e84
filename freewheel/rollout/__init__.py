"""Acting: how one Env of B lanes is driven, and the Recipe that travels to where it is driven."""
