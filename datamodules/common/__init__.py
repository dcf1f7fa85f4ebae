"""What several kinds of data share: loaders, batches, caches, archives, faults."""
