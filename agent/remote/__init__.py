"""Flash over the fabric: sessions to the enclosures, and each worker's own queues on them."""
