"""What cannot be bought: an enclosure, a lab with a real kernel, later a soft-RoCE NIC."""
