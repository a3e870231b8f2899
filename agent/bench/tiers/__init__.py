"""`g35 bench --tiers`: one workload before each of the ways in which g35 keeps blocks below the GPU host."""
