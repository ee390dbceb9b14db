"""Items from their request to their embedding: queue, batches, loss."""
