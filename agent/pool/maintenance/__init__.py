"""What walks through a pool in the background: scrub, rekey, rebalance, replication."""
