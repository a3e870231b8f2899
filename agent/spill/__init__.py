"""G4: values that were evicted, in a folder or a bucket below the flash (docs/tiers.md)."""
