"""Pure functions of queries, keys and values, without parameters, projections or module states."""
