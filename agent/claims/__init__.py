"""`g35 claims`: what the announced claims of a G3.5 tier need, where they hold, and where not."""
