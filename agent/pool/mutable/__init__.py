"""Values that change: replaced whole, read by their newest write, and held while somebody reads them."""
