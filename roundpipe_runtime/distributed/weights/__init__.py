"""Model state in shards; each shard is stored on one rank."""
