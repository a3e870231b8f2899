"""What the agent says about itself: one snapshot, shown as JSON, as a table, or as metrics."""
