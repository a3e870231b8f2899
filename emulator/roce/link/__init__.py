"""Links under an emulated NIC: a UDP socket, and a tap round it."""
