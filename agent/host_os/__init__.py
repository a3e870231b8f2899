"""What the agent asks of the machine that it runs on."""
