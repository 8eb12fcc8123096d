"""What results are compared with: one process, brute force, simulated ranks, DTensor's rules, published figures."""
