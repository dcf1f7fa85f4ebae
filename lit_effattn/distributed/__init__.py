"""Several processes: sequence and tensor parallelism, sharding, strategies."""
