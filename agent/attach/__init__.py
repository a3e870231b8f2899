"""From enclosures to volumes: connect, look at what namespaces carry, follow the pool map."""
