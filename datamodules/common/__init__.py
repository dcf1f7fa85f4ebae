"""Parts shared by several kinds of data: loaders, batches, caches, archives, faults."""
