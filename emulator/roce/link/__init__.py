"""Links under an emulated NIC: a UDP socket, a network in memory with weather, and a tap round either."""
