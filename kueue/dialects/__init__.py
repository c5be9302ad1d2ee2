"""Other systems' commands on the same server; empty until they come."""
