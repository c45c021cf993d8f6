"""What is predicted and what is known of candidates: peak memory, throughput, feasibility."""
